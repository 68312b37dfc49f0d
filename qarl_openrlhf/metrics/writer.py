"""metrics.jsonl: one JSON object a step, always written, flushed at once."""

import json
import math
import os
import time

from qarl_openrlhf.lines import append_lines
from qarl_openrlhf.metrics.errors import named

PASS_1 = "_pass1"


class MetricsWriter:
    """Appends to ``<directory>/metrics.jsonl``; notes go to ``notes.jsonl``, held-out evaluations to ``evaluations.jsonl``.

    A resumed run appends to the same file: steps it does again appear twice; the later line counts, and no later step of before (report/branch.py).
    MetricsError where one cannot be written.
    """

    def __init__(self, directory: str):
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, "metrics.jsonl")
        self.notes_path = os.path.join(directory, "notes.jsonl")
        self.evaluations_path = os.path.join(directory, "evaluations.jsonl")

    def write(self, step: int, metrics: dict) -> None:
        """Numbers only; names with a trailing ``/<number>`` (by position, by update) stay flat. NaN and inf become null."""
        _append(self.path, _row(step, metrics))

    def evaluation(self, step: int, metrics: dict) -> None:
        """OpenRLHF's ``eval_<dataset>_<name>`` of the policy after ``step`` (0: the start policy), and a note of its accuracies."""
        row = _row(step, metrics)
        _append(self.evaluations_path, row)
        found = (f"{name.removeprefix('eval_').removesuffix(PASS_1)} {row[name]:.3f}" for name in accuracies(row))
        if solved := ", ".join(found):
            self.note(f"evaluation {f'after step {step}' if step else 'of the start policy'}: {solved}")

    def note(self, text: str) -> None:
        _append(self.notes_path, {"time": time.time(), "note": text})


def accuracies(row: dict) -> list[str]:
    """Names of an evaluation's mean rewards of one response a prompt, by dataset; those that are numbers."""
    return [name for name, value in row.items() if name.startswith("eval_") and name.endswith(PASS_1) and value is not None]


def _row(step: int, metrics: dict) -> dict:
    row = {"step": step, "time": time.time()}
    for name, value in sorted(metrics.items()):
        number = _number(value)
        if number is not None or value is None or isinstance(value, float):
            row[name] = number
    return row


def _append(path: str, row: dict) -> None:
    with named(path):
        append_lines(path, [json.dumps(row)])


def _number(value) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
