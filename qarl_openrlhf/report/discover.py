"""Which runs lie below a directory, and which of them are seeds of one arm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from qarl_openrlhf.report.runs import ReportError, Run, load_run

STATUS = "status.json"  # written by cli.ablate_objectives
UNFINISHED = "not finished"


@dataclass(frozen=True)
class Identity:
    """What a run compares: ``objective`` (preset or objective name, "openrlhf" for OpenRLHF's own loss), ``scheme``, ``seed``."""

    objective: str
    scheme: str
    seed: int | None

    @property
    def arm(self) -> str:
        return f"{self.objective} {self.scheme}".strip()


@dataclass
class Entry:
    """One run of a set. ``run`` is None for one that never wrote a step; ``failure`` says why a run did not end."""

    identity: Identity
    directory: Path
    run: Run | None
    failure: str | None = None


def identify(directory: Path) -> Identity:
    """From status.json (a run of an ablation) or the flags in run.json; a run without either is known by its name."""
    status, flags = _read(directory / STATUS), (_read(directory / "run.json") or {}).get("flags")
    if status:
        return Identity(status["objective"], status["scheme"], status["seed"])
    if not flags:
        return Identity(directory.name, "", None)
    name = flags.get("preset") or flags.get("objective.name") or "openrlhf"
    return Identity(name.rpartition(":")[2] if ".py:" in name else name, flags.get("quant.scheme", "bf16"), flags.get("train.seed"))


def entries_below(directory: Path) -> list[Entry]:
    """Every run in or below `directory`, also those of an ablation that never wrote a step; ReportError if there is none."""
    directory = Path(directory)
    found = {path.parent for name in (STATUS, "metrics.jsonl") for path in directory.rglob(name)}
    if not found:
        raise ReportError(f"{directory / 'metrics.jsonl'} does not exist, and no run below: is {directory} a run directory (--metrics.dir)?")
    return [entry(path) for path in sorted(found)]


def entry(directory: Path) -> Entry:
    """One run directory: its steps so far and, if an ablation saw it fail, why."""
    status = _read(directory / STATUS) or {}
    try:
        run = load_run(directory)
    except ReportError:
        if not status:
            raise
        run = None
    failure = {"failed": status.get("reason"), "running": UNFINISHED}.get(status.get("state"))
    return Entry(identify(directory), directory, run, failure)


def arms(entries: list[Entry]) -> dict[str, list[Path]]:
    """{"tbpo w4a16": directories of its seeds}, of runs with steps. Runs of one arm *and* seed differ in something else and are
    told apart by their paths."""
    done = [e for e in entries if e.run is not None]
    keys = [(e.identity.arm, e.identity.seed) for e in done]
    found: dict[str, list[Path]] = {}
    for e, key in zip(done, keys):
        name = f"{e.identity.arm} ({e.directory})" if keys.count(key) > 1 else e.identity.arm
        found.setdefault(name, []).append(e.directory)
    return found


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
