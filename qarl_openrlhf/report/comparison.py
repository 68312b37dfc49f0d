"""A set of runs compared: tables by arm and pictures by scheme and by objective, in the manner of the paper's figures."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure

from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.report.discover import Entry
from qarl_openrlhf.report.plots import _any, _figure, _legend, _lines, _log_axis
from qarl_openrlhf.report.runs import Run
from qarl_openrlhf.report.summary import write_summary

Groups = dict[str, dict[str, list[Run]]]  # panel -> curve -> runs of its seeds
MAX_PANELS = 4  # a row


PICTURES = {  # name -> (what its panels are, metric, its label, log scale)
    "reward_by_scheme": ("objective", "rollout/reward_mean", "mean reward", False),  # the paper's Figure 7
    "reward_by_objective": ("scheme", "rollout/reward_mean", "mean reward", False),  # Figure 8
    "entropy_by_objective": ("scheme", "policy/entropy_sampled", "entropy, nats a token", False),  # Figure 10
    "mismatch_by_objective": ("scheme", "mismatch/abs_logp_mean", "mean |Δ log p|, nats", True),  # Figure 12
    "kl_by_objective": ("scheme", "policy/kl_start", "KL to the start policy, nats", True),
    "error_tokens_by_objective": ("scheme", "error_token/low_prob_rate", "tokens under 1e-3, share", False),
}
FILES = ("summary.csv", "summary.md", *(f"{name}.png" for name in PICTURES))  # what comparisons write


def write_comparison(entries: list[Entry], out: Path) -> list[Path]:
    """summary.csv, summary.md and the pictures; returns what was written. Works with any subset of runs done."""
    written = write_summary(entries, out)
    by_objective = _groups(entries, "objective", "scheme")
    groups = {
        "scheme": _groups(entries, "scheme", "objective"),
        "objective": {panel: curves for panel, curves in by_objective.items() if len(curves) > 1},
    }
    for name, (panel, metric, label, log) in PICTURES.items():
        figure = _panels(groups[panel], metric, label, log=log)
        if figure is not None:
            with atomic_file(out / f"{name}.png") as part:
                figure.savefig(part, format="png")
            written.append(out / f"{name}.png")
    return written


def _groups(entries: list[Entry], panel: str, curve: str) -> Groups:
    groups: Groups = {}
    for entry in entries:
        if entry.run is not None:
            curves = groups.setdefault(getattr(entry.identity, panel), {})
            curves.setdefault(getattr(entry.identity, curve), []).append(entry.run)
    return groups


def _panels(groups: Groups, metric: str, label: str, *, log: bool = False) -> Figure | None:
    """One panel a group and one curve a member: mean over seeds, and a band from the lowest to the highest."""
    groups = {panel: curves for panel, curves in groups.items() if _any(curves, metric)}
    if not groups:
        return None
    columns = min(len(groups), MAX_PANELS)
    rows = math.ceil(len(groups) / columns)
    figure, _ = _figure(columns, height=3.6 * rows)
    figure.clear()
    axes = figure.subplots(rows, columns, squeeze=False, sharey=not log).flatten()
    names = dict.fromkeys(name for curves in groups.values() for name in curves)
    for axis, (panel, curves) in zip(axes, groups.items()):
        curves = {name: curves.get(name, []) for name in names}  # one colour a name, in every panel
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        _lines(axis, curves, metric)
        values = [v for runs in curves.values() for run in runs for v in run.series(metric)[1]]
        if log and min(values) > 0:
            _log_axis(axis)
        axis.set(title=panel, ylabel=label)
        _legend(axis)
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    return figure
