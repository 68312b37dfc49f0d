"""Several evaluation directories as one table: a row a run, a column a task, and the average, like the paper's Table 1."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.data.sources import EVAL
from qarl_openrlhf.evaluation.records import read_summary
from qarl_openrlhf.evaluation.scores import figure


def read_runs(arguments: list[str]) -> dict[str, list[dict[str, float]]]:
    """['bf16=runs/a', 'runs/b'] -> {row: [{task: score in percent} of each directory]}. Equal names are seeds of one row."""
    runs: dict[str, list[dict[str, float]]] = {}
    for argument in arguments:
        name, _, path = argument.partition("=") if "=" in argument and not Path(argument).exists() else ("", "", argument)
        summary = Path(path) / "summary.json"
        if not summary.is_file():
            raise DataError(f"--table {argument}: {summary} is not there; evaluate writes it when all tasks are done")
        tasks = read_summary(summary)
        runs.setdefault(name or Path(path).name, []).append(dict(_column(task, scores) for task, scores in tasks.items()))
    return runs


def _column(task: str, scores: dict) -> tuple[str, float]:
    name, value = figure(scores)
    return task if name == "avg" else f"{task} {name}", 100 * value


def markdown(runs: dict[str, list[dict[str, float]]]) -> str:
    """Percent; mean +- standard deviation over seeds. A row that lacks a task has no average."""
    seen = {task for seeds in runs.values() for scores in seeds for task in scores}
    tasks = [task for task in EVAL if task in seen] + sorted(seen - set(EVAL))
    lines = ["| run | " + " | ".join(tasks) + " | average |", "|---" * (len(tasks) + 2) + "|"]
    for name, seeds in runs.items():
        columns = [[scores[task] for scores in seeds if task in scores] for task in tasks]
        whole = [fmean(scores[task] for task in tasks) for scores in seeds if all(task in scores for task in tasks)]
        lines.append(f"| {name} | " + " | ".join(map(_cell, [*columns, whole])) + " |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
