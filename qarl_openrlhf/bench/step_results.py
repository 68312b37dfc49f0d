"""The result file of bench_step: written after every piece, so that a run that was killed leaves what it had, and can go on."""

import json
import os
import time
from pathlib import Path


class SettingsDiffer(ValueError):
    """The file holds pieces of a run with other settings; the message names the first that differs."""


class Results:
    """``pieces``: {name: figures}; ``failures``: {name: error}. ``header``: what is the same for all of them.

    Its ``settings``, ``card`` and ``versions`` must be those of the file, ``learner`` too where both have it.

    writes: whether this process writes the file (rank 0).
    """

    def __init__(self, path: Path, header: dict, *, writes: bool = True):
        self.path, self.header, self.writes = path, header, writes
        self.pieces: dict[str, dict] = {}
        self.failures: dict[str, str] = {}
        self.summary: dict = {}
        if path.is_file():
            held = json.loads(path.read_text())
            self._require_same(held)
            self.pieces = held["pieces"]
            commands = held["commands"] + [command for command in header["commands"] if command not in held["commands"]]
            self.header = {key: held[key] for key in ("learner",) if key in held} | header | {"commands": commands}

    def _require_same(self, held: dict) -> None:
        for group in ("settings", "card", "versions", "learner"):
            both = group in held and group in self.header
            if held.get(group) == self.header.get(group) or (group == "learner" and not both):
                continue
            if isinstance(self.header[group], dict):
                old, new = held.get(group) or {}, self.header[group]
                name = next(n for n in {**old, **new} if old.get(n) != new.get(n))
                what = f"{name} {old.get(name)}, now {new.get(name)}"
            else:
                what = f"{group} {held.get(group)}, now {self.header[group]}"
            raise SettingsDiffer(f"{self.path} holds pieces of a run with {what}: name another file with --out, or remove it")

    def __contains__(self, name: str) -> bool:
        return name in self.pieces

    def put(self, name: str, figures: dict) -> None:
        """Add a piece and write the file."""
        self.pieces[name] = figures
        self.failures.pop(name, None)
        self.write()

    def fail(self, name: str, error: str) -> None:
        self.failures[name] = error
        self.write()

    def write(self) -> None:
        """The file whole, by way of another name: it is never half written."""
        if not self.writes:
            return
        record = self.header | {"summary": self.summary, "pieces": self.pieces, "failures": self.failures}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        other = self.path.with_suffix(".tmp")
        other.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(other, self.path)


class Budget:
    """Seconds left of ``minutes``; a piece is begun only if the longest of its kind so far would still fit."""

    def __init__(self, minutes: float):
        self.deadline = time.monotonic() + 60 * minutes
        self.longest: dict[str, float] = {}
        self.skipped: list[str] = []

    def allows(self, kind: str, name: str) -> bool:
        """Whether there is time for a piece; if not, it is noted in ``skipped``."""
        fits = time.monotonic() + self.longest.get(kind, 0.0) < self.deadline
        if not fits:
            self.skipped.append(name)
        return fits

    def took(self, kind: str, seconds: float) -> None:
        self.longest[kind] = max(seconds, self.longest.get(kind, 0.0))
