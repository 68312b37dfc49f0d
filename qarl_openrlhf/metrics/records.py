"""What a run directory holds beside metrics.jsonl: histograms.jsonl, tokens.jsonl and start_policy.json, all of bounded size.

    histograms.jsonl   first line: axes and bins; then one line a step with the counts of the bins that hold anything (a few kB)
    tokens.jsonl       one line a recorded response: three of each recorded step
    start_policy.json  the start policy's responses that ``policy/kl_start`` is measured on
"""

import json
import os

from qarl_openrlhf.lines import append_lines
from qarl_openrlhf.metrics.errors import named
from qarl_openrlhf.metrics.histograms import description
from qarl_openrlhf.metrics.start_policy import StartPolicy

HISTOGRAMS, TOKENS = "histograms.jsonl", "tokens.jsonl"


def step_is_recorded(step: int) -> bool:
    """Steps whose responses are kept: all up to 100, every tenth up to 1000, every hundredth after that."""
    return step <= 100 or (step <= 1000 and step % 10 == 0) or step % 100 == 0


def write_records(directory: str, step: int, record: dict) -> None:
    """Append what the learner left of a step: {"histograms", "tokens", "start_policy"}, each optional. MetricsError where it cannot."""
    if record.get("histograms"):
        path = os.path.join(directory, HISTOGRAMS)
        header = [] if os.path.exists(path) else [description()]
        _append(path, [*header, {"step": step, "counts": record["histograms"]}])
    if record.get("tokens") and step_is_recorded(step):
        _append(os.path.join(directory, TOKENS), [{"step": step, **response} for response in record["tokens"]])
    if record.get("start_policy"):
        StartPolicy(record["start_policy"]).save(directory)


def _append(path: str, rows: list[dict]) -> None:
    with named(path):
        append_lines(path, [json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows])
