"""Table and pictures of one or more runs, written side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.report import plots, table, token_plots
from qarl_openrlhf.report.runs import ReportError, Run, load_run

PICTURES = plots.PLOTS | token_plots.TOKEN_PLOTS
FILES = ("report.txt", "tokens.html", *(f"{name}.png" for name in PICTURES))  # what reports write into a run directory


@dataclass
class Report:
    """What `write_report` made: the table as text, the pictures, and notes on what was skipped and why."""

    text: str
    pictures: list[Path]
    notes: list[str]


def write_report(arms: dict[str, list[str | os.PathLike]], out: str | os.PathLike, *, until: int | None = None) -> Report:
    """Reads the runs of each arm ({name: [run directory, ...]}) up to step `until` and writes NAME.png files and report.txt
    into `out`.

    A picture whose metrics no run has, or with shares of 0 alone, is skipped with a note, as is a run without a step up to
    `until`. Raises ReportError for a directory without metrics, and when no run is left.
    """
    runs, notes = _load(arms, until)
    out = Path(out)
    pictures = []
    for name, draw in PICTURES.items():
        figure = draw(runs)
        if figure is None:
            notes.append(f"{name}.png skipped: no run has its metrics, or all are 0")
            continue
        with atomic_file(out / f"{name}.png") as part:
            figure.savefig(part, format="png")
        pictures.append(out / f"{name}.png")
    text = table.table_text(runs)
    with atomic_file(out / "report.txt") as part:
        part.write_text(text, encoding="utf-8")
    return Report(text, pictures, notes)


def _load(arms: dict[str, list[str | os.PathLike]], until: int | None) -> tuple[dict[str, list[Run]], list[str]]:
    runs: dict[str, list[Run]] = {}
    notes, too_late = [], []
    for name, directories in arms.items():
        for run in map(load_run, directories):
            try:
                cut = run.cut(until)
            except ReportError as error:
                too_late.append(str(error))
            else:
                runs.setdefault(name, []).append(cut)
                notes += run.notes
    if not runs:
        raise ReportError("; ".join(too_late))
    ends = sorted(run.steps[-1] for group in runs.values() for run in group)
    if ends[0] != ends[-1]:
        averages = f"the runs end at different steps ({ends[0]} to {ends[-1]}), so their averages are of different steps"
        notes.append(f"{averages}: --until {ends[0]} compares equal ones")
    return runs, notes + [f"{reason}: left out" for reason in too_late]
