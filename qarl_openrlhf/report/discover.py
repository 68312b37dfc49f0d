"""Which runs lie below a directory, and which of them are seeds of one arm."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from qarl_openrlhf.metrics.run_directory import is_earlier
from qarl_openrlhf.objectives import PRESETS
from qarl_openrlhf.report.runs import ReportError, Run, load_run

STATUS = "status.json"  # written by cli.ablate_objectives
UNFINISHED = "not finished"
STATES = {"finished": "finished", "failed": "failed", "running": "unfinished"}  # of status.json -> of the summary


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
    """One run of a set. ``run`` is None for one that never wrote a step; ``failure`` says why a run did not end; ``notes``: what
    could not be read of it. ``state``: "finished", "failed", "unfinished", or "unknown" for a run that no ablation watched: whether
    it ended or was killed is written nowhere."""

    identity: Identity
    directory: Path
    run: Run | None
    failure: str | None = None
    notes: list[str] = field(default_factory=list)
    state: str = "unknown"

    def cut(self, until: int | None) -> "Entry":
        """The same run up to step `until`; how it ended after that step is no longer told: it counts as finished."""
        if until is None or self.run is None:
            return self
        cut = replace(self, run=self.run.cut(until))
        return replace(cut, failure=None, state="finished") if self.run.steps[-1] >= until else cut


def identify(directory: Path) -> Identity:
    """From status.json (a run of an ablation) or the flags in run.json; a run without either is known by its name."""
    status, flags = _read(directory / STATUS) or {}, (_read(directory / "run.json") or {}).get("flags")
    if {"objective", "scheme", "seed"} <= status.keys():
        return Identity(str(status["objective"]), str(status["scheme"]), status["seed"])
    if not flags or not isinstance(flags, dict):
        return Identity(directory.name, "", None)
    name = _arm_name(flags)
    scheme = str(flags.get("quant.scheme", "bf16"))
    return Identity(name.rpartition(":")[2] if ".py:" in name else name, scheme, flags.get("train.seed"))


def _arm_name(flags: dict) -> str:
    """The preset, if its objective is what ran: --objective.name after it on the command line wins."""
    preset, objective = flags.get("preset"), flags.get("objective.name")
    if preset and objective in (None, PRESETS.get(str(preset), {}).get("objective.name")):
        return str(preset)
    return str(objective or "openrlhf")


def entries_below(directory: Path) -> list[Entry]:
    """Every run in or below `directory`, also those of an ablation that never wrote a step, but not what a later run moved out
    of its way; ReportError if there is none."""
    directory = Path(directory)
    # Not rglob, which fails where a run that is training removes a checkpoint meanwhile.
    found = {Path(place) for place, _, files in os.walk(directory, followlinks=False) if {STATUS, "metrics.jsonl"} & set(files)}
    found = {path for path in found if path == directory or not is_earlier(path)}
    if not found and (directory / "run.json").is_file():
        raise ReportError(f"{directory} has no steps yet: the run has begun, or ended before its first")
    if not found:
        raise ReportError(f"{directory / 'metrics.jsonl'} does not exist, and no run below: is {directory} a run directory (--metrics.dir)?")
    return [entry(path) for path in sorted(found)]


def entry(directory: Path) -> Entry:
    """One run directory: its steps so far and, if an ablation saw it fail, why. One without steps has just begun."""
    status = _read(directory / STATUS) or {}
    notes = [f"{directory / n} is no JSON object, left out" for n in (STATUS, "run.json") if (directory / n).exists() and _read(directory / n) is None]
    state = STATES.get(str(status.get("state")), "unknown")
    failure = {"failed": str(status.get("reason")), "unfinished": UNFINISHED}.get(state)
    try:
        run = load_run(directory)
    except ReportError as error:
        run = None
        if not status:
            failure, state = UNFINISHED, "unfinished"
            notes.append(f"{error}: left out")
    return Entry(identify(directory), directory, run, failure, notes, state)


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
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
