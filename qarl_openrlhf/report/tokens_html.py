"""Recorded responses as one HTML page: each token with its push, its band, its weight and its probabilities."""

from __future__ import annotations

import html
import math
from pathlib import Path

from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.lines import read_objects
from qarl_openrlhf.metrics.error_tokens import LOW_PROBABILITY
from qarl_openrlhf.metrics.records import TOKENS
from qarl_openrlhf.metrics.token_records import EDGE_TOKENS
from qarl_openrlhf.objectives import REGIONS
from qarl_openrlhf.report.branch import current_branch, with_steps
from qarl_openrlhf.report.runs import ReportError

MAX_STEPS = 12
FIELDS = frozenset(
    "step why prompt ids tokens left_out advantage reward update old current sampler region push weight".split()
)
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; color: #222 }
.response { border: 1px solid #ddd; border-radius: 6px; padding: .6em 1em; margin: .8em 0 }
.response p { margin: .2em 0 .5em; color: #555 }
.text { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.prompt { color: #888 } .text span { border-bottom: 3px solid transparent; padding: 1px 0 }
.text .below { border-color: #2166ac } .text .above { border-color: #b2182b } .text .rejected { border-color: #555 }
.text .none { color: #999; background: repeating-linear-gradient(45deg, #eee 0 3px, #fff 3px 6px) }
.text .unlikely { outline: 1px dashed #b2182b } .gap { color: #b2182b }
"""
LEGEND = (
    '<div class="text"><span style="background:rgba(0,158,115,.45)"> made likelier </span> '
    '<span style="background:rgba(213,94,0,.45)"> made less likely </span> <span class="none"> no gradient (clipped) </span> '
    '<span class="below">ratio below the band</span> <span class="above">ratio above it</span> '
    '<span class="rejected">response rejected by its weight</span> '
    f'<span class="unlikely">old probability under {LOW_PROBABILITY:g}</span></div>'
    "<p>Stronger colour: larger push, as a multiple of the response's |advantage|. Hover over a token for its numbers. "
    f"Of a response of more than {2 * EDGE_TOKENS} tokens the first and last {EDGE_TOKENS} are recorded: "
    "its mean Δ and its counts by band are of those alone.</p>"
)


def write_tokens_page(directory: Path, out: Path | None = None, steps: list[int] | None = None) -> Path:
    """Writes `directory`/tokens.html (or `out`) from tokens.jsonl: the given steps, or at most 12 evenly over the run.

    ReportError when the run recorded no responses, or not those steps.
    """
    by_step = load_records(directory)
    if missing := sorted(set(steps or []) - set(by_step)):
        raise ReportError(f"{directory} has no responses of step {', '.join(map(str, missing))}; it has {_ranges(sorted(by_step))}")
    chosen = steps or _evenly(sorted(by_step), MAX_STEPS)
    parts = [f"<h2>Step {step}</h2>" + "".join(map(_response, by_step[step])) for step in chosen]
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Tokens of {html.escape(directory.name)}</title>'
        f"<style>{STYLE}</style><h1>Responses of {html.escape(directory.name)}, token by token</h1>{LEGEND}{''.join(parts)}</html>\n"
    )
    path = out or directory / "tokens.html"
    with atomic_file(path) as part:
        part.write_text(page, encoding="utf-8")
    return path


def load_records(directory: Path) -> dict[int, list[dict]]:
    """{step: its recorded responses}; of a run that was resumed, those of the steps that led to its last one."""
    path = Path(directory) / TOKENS
    if not path.is_file():
        raise ReportError(f"{path} does not exist: is {directory} a run directory (--metrics.dir) with a finished step?")
    rows = current_branch(with_steps([row for row in read_objects(path) if FIELDS <= row.keys()]), several=True).rows
    metrics = Path(directory) / "metrics.jsonl"
    steps = current_branch(with_steps(read_objects(metrics) if metrics.is_file() else []))
    if steps.restarts:
        # Few steps are recorded: a resumed run may not have come to one yet that shows that the later ones are of before.
        # Responses are written before their step's line of metrics.jsonl, hence the 1.
        rows = [row for row in rows if row["step"] <= steps.rows[-1]["step"] + 1]
    by_step: dict[int, list[dict]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    if not by_step:
        raise ReportError(f"{path} has no responses yet")
    return {step: _last_written(responses) for step, responses in by_step.items()}


def _last_written(responses: list[dict]) -> list[dict]:
    """Those of a step that was recorded last: each is chosen for another reason. A step may have been done twice in a row."""
    latest: dict[str, dict] = {}
    for row in reversed(responses):
        if row["why"] in latest:
            break
        latest[row["why"]] = row
    return list(latest.values())[::-1]


def _response(record: dict) -> str:
    counts = [f"{record['region'].count(i)} {name}" for i, name in enumerate(REGIONS)] if record["region"] else []
    facts = [
        record["why"],
        f"A = {record['advantage']:+.3f}",
        *([] if record["reward"] is None else [f"reward {record['reward']:g}"]),
        f"{len(record['ids']) + record['left_out']} tokens",
        f"update {record['update']} of the rollout",
    ]
    figures = [f"{sum(c - o for c, o in zip(record['current'], record['old'])) / max(1, len(record['ids'])):+.2e} mean Δ"]
    figures += [", ".join(c for c in counts if not c.startswith("0 "))] if counts else []
    if record["left_out"]:
        figures = [f"of the {len(record['ids'])} tokens shown: {figures[0]}", *figures[1:]]
    tokens = [_token(record, i) for i in range(len(record["ids"]))]
    if record["left_out"]:
        tokens.insert(EDGE_TOKENS, f'<span class="gap"> [{record["left_out"]} tokens left out] </span>')
    prompt = html.escape(record["prompt"] or "")
    return (
        f'<div class="response"><p>{html.escape(" · ".join(facts + figures))}</p>'
        f'<div class="text"><span class="prompt">{prompt}</span>{"".join(tokens)}</div></div>'
    )


def _token(record: dict, i: int) -> str:
    def at(name: str):
        return None if record[name] is None else record[name][i]

    text = str(record["ids"][i]) + " " if record["tokens"] is None else record["tokens"][i].replace("\n", "⏎\n")
    region, push, weight = at("region"), at("push"), at("weight")
    classes = [] if region is None or REGIONS[region] == "inside" else [REGIONS[region]]
    style = ""
    if push == 0:
        classes.append("none")
    elif push is not None:
        color = "0,158,115" if push > 0 else "213,94,0"
        style = f' style="background:rgba({color},{min(0.75, 0.12 + 0.33 * abs(push)):.2f})"'
    old, current, sampler = at("old"), at("current"), at("sampler")
    if old < math.log(LOW_PROBABILITY):
        classes.append("unlikely")
    facts = [f"id {record['ids'][i]}", f"p old {_p(old)}", f"p current {_p(current)}"]
    facts += [] if sampler is None else [f"p sampler {_p(sampler)}"]
    facts.append(f"r = {_p(current - old)}")
    facts += [] if weight is None else [f"w = {weight:.4g}"]
    facts += [] if region is None else [REGIONS[region]]
    facts += [] if push is None else [f"push {push:+.3g}"]
    shown = f' class="{" ".join(classes)}"' if classes else ""
    return f'<span{shown}{style} title="{html.escape(", ".join(facts))}">{html.escape(text)}</span>'


def _p(log_value: float) -> str:
    return f"{math.exp(min(log_value, 50.0)):.4g}"


def _evenly(steps: list[int], count: int) -> list[int]:
    """At most `count` of them, the first and the last among them."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _ranges(steps: list[int]) -> str:
    """[1, 2, 3, 10] -> "1-3, 10"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
