"""Reading runs: a directory with metrics.jsonl, one JSON object a step."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from qarl_openrlhf.lines import read_lines
from qarl_openrlhf.report.branch import Branch, current_branch, step_of


class ReportError(ValueError):
    """A directory without usable metrics."""


@dataclass
class Run:
    """Steps of one run in order; of one that was resumed, those that led to its last step."""

    directory: Path
    rows: list[dict]
    notes: list[str] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)  # of held-out data: rows of evaluations.jsonl, step 0 the start policy
    until: int | None = None  # later steps were left out

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    def cut(self, until: int | None) -> "Run":
        """The same run without the steps after `until`; ReportError if none is left."""
        if until is None:
            return self
        rows, evaluations = ([row for row in some if row["step"] <= until] for some in (self.rows, self.evaluations))
        if not rows:
            raise ReportError(f"{self.directory} has no step up to {until}: its first is {self.rows[0]['step']}")
        return replace(self, rows=rows, evaluations=evaluations, until=until)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one metric, without the steps that lack it."""
        pairs = [(row["step"], row[name]) for row in self.rows if _is_number(row.get(name))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def has(self, name: str) -> bool:
        return any(_is_number(row.get(name)) for row in self.rows)

    def names(self, prefix: str) -> list[str]:
        """All metrics of the run whose name starts with `prefix`."""
        return sorted({name for row in self.rows for name in row if name.startswith(prefix)})


def load_run(directory: str | os.PathLike) -> Run:
    """Reads `directory`/metrics.jsonl. Lines that a killed process left unfinished are skipped with a note; ReportError when
    there is no file or no step in it."""
    directory = Path(directory)
    path = directory / "metrics.jsonl"
    if not path.is_file() and (directory / "run.json").is_file():
        raise ReportError(f"{directory} has no steps yet: the run has begun, or ended before its first")
    if not path.is_file():
        raise ReportError(f"{path} does not exist: is {directory} a run directory (--metrics.dir)?")
    steps, notes = _read_steps(path)
    if not steps.rows:
        raise ReportError(f"{path} has no steps yet")
    evaluations, more = _read_steps(directory / "evaluations.jsonl")
    # A resumed run has none of its own before it comes to a step that is evaluated: those of before are known by their time.
    restarts = [(row["step"], row["time"]) for row in steps.restarts if _is_number(row.get("time"))]

    def stale(row: dict) -> bool:
        return _is_number(row.get("time")) and any(row["step"] >= step and row["time"] < time for step, time in restarts)

    evaluations = evaluations.without(stale)
    notes += more + steps.note(f"metrics.jsonl of {directory.name}") + evaluations.note(f"evaluations.jsonl of {directory.name}")
    return Run(directory, steps.rows, notes, evaluations.rows)


def _read_steps(path: Path) -> tuple[Branch, list[str]]:
    """Rows in order of their steps, and notes on lines that are none; nothing where there is no file."""
    rows, notes = [], []
    for number, line in enumerate(read_lines(path) if path.is_file() else (), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        step = step_of(row)
        if step is None:
            notes.append(f"{path.name} of {path.parent.name}: line {number} is no step, skipped")
        else:
            rows.append(row | {"step": step})
    return current_branch(rows), notes


def _is_number(value) -> bool:
    """NaN, infinity and what no picture has room for, which our writer never writes, are gaps."""
    return isinstance(value, (int, float)) and abs(value) < 1e30  # False for NaN


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: list[float]) -> float | None:
    """Standard error of the mean of `values`; None for fewer than two."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1) / len(values))
