"""metrics.jsonl: one JSON object a step, always written, flushed at once."""

import json
import math
import os
import time

from qarl_openrlhf.data.lines import append_lines


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


def _append(path: str, row: dict) -> None:
    append_lines(path, [json.dumps(row)])


def _number(value) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
