"""Problems with their solutions, as text: the prompt, and the response that a model is first trained to give.

Styles: `question` and `equation` are the prompts of `data.reasoning_gym`, answered at once; `steps` is the prompt of
`equation`, answered by every partial result on a line of its own. An error in one line goes on into all that follow:

    prompt     12 + 34 - 56 =
    response   12+34=46
               46-56=-10
               <answer>-10</answer>

With slips, some partial results are off by one or ten: a model that learns from such solutions knows the right way and strays
from it at that rate, so that it has something to unlearn. One that merely learnt too little errs without a doubt, and all of
its samples of a problem are alike, which gives a policy gradient little to work with (figures: docs/data.md).
"""

from __future__ import annotations

import re
from itertools import count
from random import Random
from typing import Iterator

from qarl_openrlhf.data.reasoning_gym import STYLES as PROMPT_STYLES
from qarl_openrlhf.data.reasoning_gym import TRIES_PER_PROBLEM, DataError, expression, problems, render

STYLES = ("steps", *PROMPT_STYLES)
CHAIN = re.compile(r"-?\d+(?: [-+] -?\d+)+")


def prompt_style(style: str) -> str:
    """The style of `data.reasoning_gym` that writes the prompts."""
    return "equation" if style == "steps" else style


def response(entry: dict, style: str, *, slips: float = 0.0, random: Random | None = None) -> str:
    """The response to one problem, without the end token. DataError for `steps` of what is no chain of sums.

    slips: the probability, drawn from `random`, that a partial result (of `steps`) is off; the rest follows from the wrong one.
    """
    answer, lines = entry["answer"], []
    if style == "steps":
        text = expression(entry)
        if not CHAIN.fullmatch(text):
            raise DataError(f"style 'steps' writes out sums of two or more whole numbers, and {text!r} is none: use 'equation'")
        first, *rest = text.split(" ")
        total = int(first)
        for sign, term in zip(rest[::2], rest[1::2]):
            before, total = total, total + int(term) if sign == "+" else total - int(term)
            if slips and random.random() < slips:
                total += random.choice((-10, -1, 1, 10))
            lines.append(f"{before}{sign}{term}={total}")
        answer, lines = total, ["", *lines]  # the prompt ends with "=", the response begins on the next line
    return "\n".join([*lines, f"<answer>{answer}</answer>"])


def distinct(entries: Iterator[dict], n: int, *, but: set[str]) -> list[dict]:
    """`n` entries whose questions differ from each other and are not in `but`; DataError when there are too few."""
    chosen: dict[str, dict] = {}
    repeated = 0
    while len(chosen) < n:
        entry = next(entries)
        repeated = repeated + 1 if entry["question"] in chosen or entry["question"] in but else 0
        if repeated > TRIES_PER_PROBLEM:
            found, wanted = len(chosen) + len(but), n + len(but)
            raise DataError(f"the task has only about {found} different problems, {wanted} were asked for: make it larger")
        if not repeated:
            chosen[entry["question"]] = entry
    return list(chosen.values())


def supervised(
    task: str, config: dict, style: str, seed: int, exclude: str | None, *, slips: float = 0.0, but: set[str]
) -> Iterator[tuple[str, str]]:
    """Endless (prompt, response) pairs from a stream of problems of their own, without those in `but`."""
    random = Random(f"slips {seed}")
    stream = problems(task, config, f"supervised {seed}", exclude)
    refused = 0
    for _ in count():
        entry = next(stream)
        refused = refused + 1 if entry["question"] in but else 0
        if refused > TRIES_PER_PROBLEM:
            raise DataError(f"prompts and held-out set hold all problems of '{task}': nothing is left to train on")
        if not refused:
            yield render(entry, [], prompt_style(style)), response(entry, style, slips=slips, random=random)
