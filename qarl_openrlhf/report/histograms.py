"""Reading histograms.jsonl: counts of tokens by step, with the axes they were counted on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qarl_openrlhf.lines import read_objects
from qarl_openrlhf.metrics.records import HISTOGRAMS
from qarl_openrlhf.report.branch import current_branch, with_steps
from qarl_openrlhf.report.runs import Run


@dataclass
class Histograms:
    """``axes``: {histogram: axis names}; ``bins``: {axis: names of the bins, or the edges between them}; ``steps``: {step: counts}."""

    axes: dict[str, list[str]]
    bins: dict[str, list]
    steps: dict[int, dict]

    def size(self, axis: str) -> int:
        """Bins of an axis: one a name, or one more than there are edges between them."""
        return len(self.bins[axis]) + (not isinstance(self.bins[axis][0], str))

    def total(self, name: str, until: int | None = None) -> np.ndarray | None:
        """int64 counts over all steps (up to `until`), one dimension an axis; None if nothing was counted."""
        counts = np.zeros(int(np.prod([self.size(axis) for axis in self.axes[name]])), dtype=np.int64)
        for step, counted in self.steps.items():
            if name in counted and (until is None or step <= until):
                counts[counted[name]["at"]] += counted[name]["n"]
        return counts.reshape([self.size(axis) for axis in self.axes[name]]) if counts.any() else None


def load_histograms(directory: Path) -> Histograms | None:
    """The counts of the run in `directory`, None if it has none. Of one that was resumed, those of the steps that led
    to its last one; the unfinished line of a killed process is skipped."""
    path = Path(directory) / HISTOGRAMS
    if not path.is_file():
        return None
    rows = read_objects(path)
    header = next((row for row in rows if {"axes", "bins"} <= row.keys()), None)
    if header is None:
        return None
    counted = current_branch(with_steps([row for row in rows if "counts" in row])).rows
    return Histograms(header["axes"], header["bins"], {row["step"]: row["counts"] for row in counted})


def total_of(runs: list[Run], name: str) -> tuple[np.ndarray, Histograms] | None:
    """Counts of all runs of an arm together, and the axes; None if no run has them."""
    found = [(h, run.until) for h, run in ((load_histograms(run.directory), run) for run in runs) if h is not None and name in h.axes]
    totals = [(total, h) for total, h in ((h.total(name, until), h) for h, until in found) if total is not None]
    return (sum(total for total, _ in totals), totals[0][1]) if totals else None
