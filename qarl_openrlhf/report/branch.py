"""The steps that count of a run that was resumed from an earlier checkpoint: its files still hold those of before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Branch:
    """``rows`` that led to the run's last step, in order; ``restarts``: the rows at which the steps went back; ``abandoned``: steps of
    before that the run has not done again."""

    rows: list[dict]
    restarts: list[dict]
    abandoned: list[int]

    def without(self, stale) -> "Branch":
        """The same without the rows for which ``stale(row)`` holds: abandoned too."""
        kept = [row for row in self.rows if not stale(row)]
        return Branch(kept, self.restarts, sorted({*self.abandoned, *(row["step"] for row in self.rows)} - {row["step"] for row in kept}))

    def note(self, name: str) -> list[str]:
        """One sentence on what was left out, if anything was."""
        if not (gone := self.abandoned):
            return []
        which = f"{len(gone)} abandoned steps of before ({gone[0]} to {gone[-1]}) are left out"
        return [f"{name}: the run was resumed from an earlier checkpoint; {which}"]


def current_branch(rows: list[dict], *, several: bool = False) -> Branch:
    """``rows`` as a file has them, each with an integer ``step``. One that does not go on from the row before it is a resumed run's: all
    of its step or a later one that was written before it no longer belongs to the run.

    several: a step may have several rows, one after the other.
    """
    kept: list[dict] = []
    restarts, dropped = [], set()
    for row in rows:
        before = len(kept)
        while kept and (kept[-1]["step"] > row["step"] or (kept[-1]["step"] == row["step"] and not several)):
            dropped.add(kept.pop()["step"])
        if len(kept) < before:
            restarts.append(row)
        kept.append(row)
    return Branch(kept, restarts, sorted(dropped - {row["step"] for row in kept}))


def with_steps(rows: list[dict]) -> list[dict]:
    """Those whose ``step`` is a step, as an integer."""
    return [row | {"step": step} for row in rows if (step := step_of(row)) is not None]


def step_of(row) -> int | None:
    """None where there is none: NaN, a word, no object at all."""
    try:
        step = int(row["step"])
    except (ValueError, TypeError, KeyError, OverflowError):  # OverflowError: a step of Infinity
        return None
    return step if step >= 0 else None
