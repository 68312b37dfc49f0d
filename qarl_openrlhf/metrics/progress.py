"""One aligned line a step in the driver's terminal, read from the run directory as it is written."""

import json
import os
import threading


def share(value: float) -> str:
    """A share in percent with two digits that count, however small it is: 12%, 0.29%, 0.00042%, 3.1e-06%."""
    return f"{value:.0%}" if value >= 0.1 or value == 0 else f"{100 * value:.2g}%"


COLUMNS = (
    ("reward", "rollout/reward_mean", "{:.3f}".format),
    ("mismatch", "mismatch/abs_logp_mean", "{:.4f}".format),
    ("in-band", "objective/in_band_frac", "{:.0%}".format),
    ("changed", "sync/changed_code_frac", share),
    ("tok/s", "rollout/tok_per_s", "{:.0f}".format),
    ("step", "timing/step_total", "{:.1f} s".format),
)


def follow(directory: str, stop: threading.Event, show=print, *, codes: bool = True) -> None:
    """Show new notes and steps of a run until ``stop`` is set (and then what is left). Meant for a thread. codes: of :func:`step_line`."""
    files = [_Tail(os.path.join(directory, name)) for name in ("notes.jsonl", "metrics.jsonl")]
    while True:
        last = stop.wait(0.5)
        for row in (row for file in files for row in file.new_rows()):
            show(row["note"] if "note" in row else step_line(row, codes=codes), flush=True)
        if last:
            return


def step_line(row: dict, *, codes: bool = True) -> str:
    """``step   3  reward 0.312  mismatch 0.0412 ...``; a metric that is missing shows as ``-``. codes: whether the run has low-bit
    codes, whose changed share is part of the line; the 0 that one in BF16 logs would read as weights that stand still."""
    cells = []
    for label, name, form in COLUMNS:
        if name == "sync/changed_code_frac" and not codes:
            continue
        value = row.get(name)
        cells.append(f"{label} {form(value) if value is not None else '-':>8}")
    return f"step {row['step']:>4}  " + "  ".join(cells)


class _Tail:
    """New complete lines of a JSON-lines file, from where it ended when the run began."""

    def __init__(self, path: str):
        self.path = path
        exists = os.path.exists(path)
        self.offset, self.inode = (os.path.getsize(path), os.stat(path).st_ino) if exists else (0, None)

    def new_rows(self) -> list[dict]:
        if not os.path.exists(self.path):
            return []
        if (inode := os.stat(self.path).st_ino) != self.inode:  # the earlier run's file was moved out of the way
            self.offset, self.inode = 0, inode
        with open(self.path, encoding="utf-8", errors="replace") as file:
            file.seek(self.offset)
            rows = []
            while (line := file.readline()).endswith("\n"):
                self.offset = file.tell()
                try:
                    rows.append(json.loads(line))
                except ValueError:  # the end of a line that an earlier, killed run left unfinished
                    continue
        return rows
