"""Scores of one task, from how many of each item's k samples are right. All are fractions; tokens are means a response."""

from __future__ import annotations

from math import comb, sqrt
from statistics import fmean, pstdev, stdev


def pass_at(k: int, n: int, right: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a right one (the unbiased estimator of pass@k)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def figure(scores: dict) -> tuple[str, float]:
    """(name, value) of the figure that stands for a task in tables and averages: avg@k, or pass@k of programs."""
    if scores.get("headline") == "pass":
        return f"pass@{scores['k']}", scores["pass"][str(scores["k"])]
    return "avg", scores["avg"]


def task_scores(records: list[dict], k: int, *, headline: str = "avg") -> dict:
    """avg: mean accuracy, avg@k; pass: pass@1, 2, 4, ... k; spread: standard deviation of the k runs that the j-th samples
    form; stderr: of avg, over items (problems are a sample, too). records: see `records.py`, at least k samples each; headline:
    "avg" or "pass", the `figure` of the task."""
    rows = [[bool(sample["right"]) for sample in record["samples"][:k]] for record in records]
    samples = [sample for record in records for sample in record["samples"][:k]]
    sizes = sorted({2**i for i in range(k.bit_length())} | {k})
    means = [fmean(row) for row in rows]
    return {
        "items": len(rows),
        "k": k,
        "headline": headline,
        "avg": fmean(means),
        "pass": {str(size): fmean(pass_at(size, k, sum(row)) for row in rows) for size in sizes if size <= k},
        "spread": pstdev(fmean(row[j] for row in rows) for j in range(k)),
        "stderr": stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0,
        "tokens": fmean(sample["tokens"] for sample in samples),
        "cut_off": fmean(sample["finish"] == "length" for sample in samples),
        "no_answer": fmean(sample["answer"] is None for sample in samples),
        "over_time": fmean(sample["verdict"].startswith(("timeout", "crash")) for sample in samples),
    }
