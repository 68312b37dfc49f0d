"""The table a run ends with: one column an arm, one row a quantity."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from qarl_openrlhf.metrics.progress import share
from qarl_openrlhf.report.runs import Run, mean, standard_error

EDGE = 5  # steps at the beginning and the end whose rewards are compared
PHASES = (
    ("generation", "timing/generation"),
    ("old log-probs", "timing/old_logprobs"),
    ("training", "timing/train"),
    ("publish", "timing/publish"),
)


def reward_gain(run: Run) -> dict | None:
    """Mean reward of the first and last steps and how many standard errors lie between them.

    {first, first_se, last, last_se, gain, z, edge}: `edge` is 5 steps, or half of a run of fewer than ten; standard errors
    are over steps and None where there is one step. None without `rollout/reward_mean` or with fewer than two steps.
    """
    _, rewards = run.series("rollout/reward_mean")
    edge = min(EDGE, len(rewards) // 2)
    if edge == 0:
        return None
    first, last = rewards[:edge], rewards[-edge:]
    first_se, last_se = standard_error(first), standard_error(last)
    gain = mean(last) - mean(first)
    z = None
    if first_se is not None:
        spread = math.hypot(first_se, last_se)
        z = gain / spread if spread else None
    return {"first": mean(first), "first_se": first_se, "last": mean(last), "last_se": last_se, "gain": gain, "z": z, "edge": edge}


def _after_first(run: Run) -> tuple[Run, str]:
    """The run without its first step, which warms up, and what says so in the name of a row; as it is where it has no other."""
    if len(run.rows) < 2:
        return run, ""
    return Run(run.directory, run.rows[1:]), f", after step {run.rows[0]['step']}"


def phase_seconds(run: Run, *, skip_first: bool = True) -> dict[str, float]:
    """Mean seconds a step by phase, and `other` (the rest of the step) and `step`. The first step, which warms up, is left out
    when there are others. Phases that were not measured are missing."""
    shortened = _after_first(run)[0] if skip_first else run
    seconds = {}
    for label, name in PHASES:
        values = shortened.series(name)[1]
        if values:
            seconds[label] = sum(values) / len(shortened.rows)
    total = shortened.series("timing/step_total")[1]
    if total:
        seconds["step"] = mean(total)
        seconds["other"] = max(0.0, seconds["step"] - sum(seconds.get(label, 0.0) for label, _ in PHASES))
    return seconds


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _first_last(run: Run, name: str, form: str) -> str | None:
    values = run.series(name)[1]
    return f"{form.format(values[0])} / {form.format(values[-1])}" if values else None


def _average(run: Run, name: str, form: Callable[[float], str]) -> str | None:
    values = run.series(name)[1]
    return form(mean(values)) if values else None


def summary(run: Run) -> dict[str, str | None]:
    """The table's column for one run: row title -> text, None where the run did not measure it."""
    rows: dict[str, str | None] = {"steps": str(len(run.rows))}
    gain = reward_gain(run)
    edge = gain["edge"] if gain else EDGE
    rows[f"reward, first {edge} steps"] = _with_error(gain["first"], gain["first_se"]) if gain else None
    rows[f"reward, last {edge} steps"] = _with_error(gain["last"], gain["last_se"]) if gain else None
    rows["gain, in standard errors"] = f"{gain['gain']:+.3f}, {gain['z']:+.1f}" if gain and gain["z"] is not None else None
    rows["mixed groups, first / last step"] = _first_last(run, "rollout/mixed_group_frac", "{:.0%}")
    rows["mismatch |Δ log p|, first / last step"] = _first_last(run, "mismatch/abs_logp_mean", "{:.4f}")
    rows["mismatch KL, first / last step"] = _first_last(run, "mismatch/kl", "{:.4f}")
    rows["responses in band, mean"] = _average(run, "objective/in_band_frac", "{:.0%}".format)
    rows["codes changed a publish, mean"] = _average(run, "sync/changed_code_frac", share)
    total = run.series("sync/changed_code_frac_total")[1]
    rows["codes changed since the first publish"] = share(total[-1]) if total else None
    later, steps = _after_first(run)
    rows[f"rollout tokens a second, mean{steps}"] = _average(later, "rollout/tok_per_s", "{:.0f}".format)
    seconds = phase_seconds(run)
    for label in [label for label, _ in PHASES] + ["other", "step"]:
        title = f"seconds a step{steps}" + (f": {label}" if label != "step" else "")
        rows[title] = f"{seconds[label]:.2f}" if label in seconds else None
    return rows


def build_table(arms: dict[str, list[Run]]) -> Table:
    """Rich table; runs of one arm get a column each. Rows that no run measured are left out."""
    columns = []
    for name, runs in arms.items():
        for index, run in enumerate(runs, 1):
            columns.append((name if len(runs) == 1 else f"{name} #{index}", summary(run)))
    table = Table(title="QaRL run" if len(columns) == 1 else "QaRL runs")
    table.add_column("")
    for title, _ in columns:
        table.add_column(title, justify="right")
    titles = list(dict.fromkeys(row for _, rows in columns for row in rows))
    for title in titles:
        cells = [rows.get(title) for _, rows in columns]
        if any(cell is not None for cell in cells):
            table.add_row(title, *(cell or "-" for cell in cells))
    return table


def table_text(arms: dict[str, list[Run]], width: int = 120) -> str:
    """The table as plain text."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(build_table(arms))
    return capture.get()
