"""Prompt sets from reasoning-gym: `python -m qarl_openrlhf.data.reasoning_gym --task chain_sum --out FILE.jsonl ...`.

One JSON object a line, with the columns that OpenRLHF reads:
    input       the prompt (`--data.input_key input`)
    label       a JSON string {"task", "answer", "metadata"}: what the reward function needs to call the task's own scorer
    datasource  "reasoning_gym/TASK", by which OpenRLHF groups evaluation scores

Two prompt styles. `question` is the task's own wording, for a chat template. `equation` is plain text for small base-like
models: worked examples, one a line, then the open problem; the answer ends at the newline:

    7 + 1 = 8
    4 + 5 = 9
    3 + 6 =

The same arguments give the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Iterable, Iterator

from qarl_openrlhf.files import why_unwritable
from qarl_openrlhf.lines import write_jsonl

STYLES = ("question", "equation")
CHUNK = 1024  # problems of one reasoning-gym data set: some tasks prepare all of theirs at once
# Problems in a row that may be filtered out, or be repeats of worked examples, before that is an error.
TRIES_PER_PROBLEM = 1000


class DataError(ValueError):
    """A task, configuration, style or filter that gives no prompts."""


def make_task(task: str, config: dict, seed: int, size: int):
    """The reasoning-gym data set `task`; DataError names what exists or which setting it does not have."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task '{task}'; it has {', '.join(sorted(DATASETS))}")
    if taken := sorted({"seed", "size"} & config.keys()):
        raise DataError(f"--config {taken[0]}: give --{'n' if taken[0] == 'size' else 'seed'} in its place")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **config)
    except Exception as error:  # each task checks its own settings, in its own way
        raise DataError(f"task '{task}' refuses the configuration {config}: {error}") from None


def expression(entry: dict) -> str:
    """The bare expression of an entry, e.g. '3 + 6'; DataError for tasks that have none."""
    try:
        return entry["metadata"]["expression"]
    except KeyError:
        raise DataError(
            f"style 'equation' needs an expression, which task '{entry['metadata'].get('source_dataset')}' has not; "
            "use style 'question'"
        ) from None


def problems(task: str, config: dict, seed: int | str, exclude: str | None) -> Iterator[dict]:
    """Endless entries of a task, without those whose question contains `exclude`. DataError when nothing passes."""
    rejected = 0
    for chunk in count():
        # reasoning-gym seeds problem i with seed + i: neighbouring seeds would give one stream, shifted by one.
        dataset = make_task(task, config, seed=Random(f"{seed}/{chunk}").getrandbits(30), size=CHUNK)
        for entry in _entries(dataset, task, config):
            if exclude and exclude in entry["question"]:
                rejected += 1
                if rejected > TRIES_PER_PROBLEM:
                    raise DataError(f"{rejected} problems of '{task}' in a row contain '{exclude}': the filter leaves nothing")
                continue
            rejected = 0
            yield entry


def _entries(dataset, task: str, config: dict) -> Iterator[dict]:
    entries = iter(dataset)
    while True:
        try:
            entry = next(entries)
        except StopIteration:
            return
        except Exception as error:  # settings that pass the task's own checks and yet do not work, such as 2.5 terms
            raise DataError(f"task '{task}' makes no problems of the configuration {config}: {error}") from None
        yield entry


def worked_examples(task: str, config: dict, shots: int, *, shot_seed: int = 0, exclude: str | None = None) -> list[dict]:
    """`shots` entries with different questions, from a stream of their own and not from the prompts' seed: how many problems a
    small model solves depends on its examples, and two seeds of a run should start alike."""
    chosen: dict[str, dict] = {}
    stream = problems(task, config, f"shots {shot_seed}", exclude) if shots else iter(())
    repeated = 0
    while len(chosen) < shots:
        entry = next(stream)
        repeated = repeated + 1 if entry["question"] in chosen else 0
        if repeated > TRIES_PER_PROBLEM:
            raise DataError(f"task '{task}' has only {len(chosen)} different problems under {config}, {shots} shots were asked for")
        chosen.setdefault(entry["question"], entry)
    return list(chosen.values())


def render(entry: dict, shots: list[dict], style: str) -> str:
    """Prompt text of one entry."""
    if style == "equation":
        lines = [f"{expression(shot)} = {shot['answer']}\n" for shot in shots]
        return "".join(lines) + f"{expression(entry)} ="
    if style == "question":
        lines = [f"{shot['question']} {shot['answer']}\n" for shot in shots]
        return "".join(lines) + entry["question"]
    raise DataError(f"unknown style '{style}'; there are {', '.join(STYLES)}")


def prompt_rows(
    task: str,
    n: int,
    *,
    seed: int = 0,
    config: dict | None = None,
    style: str = "question",
    shots: int = 0,
    shot_seed: int = 0,
    exclude: str | None = None,
) -> list[dict]:
    """`n` rows {input, label, datasource} of reasoning-gym task `task`; see the module docstring.

    config: settings of the task (e.g. {"min_terms": 2, "max_terms": 2}); shots: worked examples before each problem, the same
    for all rows and, unless `shot_seed` differs, for all seeds; exclude: drop problems whose question contains this text
    (reasoning-gym's chain_sum mixes + and -). Raises DataError.
    """
    if n < 1:
        raise DataError(f"n must be at least 1, not {n}")
    if shots < 0:
        raise DataError(f"shots must be 0 or more, not {shots}")
    config = config or {}
    examples = worked_examples(task, config, shots, shot_seed=shot_seed, exclude=exclude)
    return rows_of(task, islice(problems(task, config, seed, exclude), n), examples, style)


def rows_of(task: str, entries: Iterable[dict], shots: list[dict], style: str) -> list[dict]:
    """The lines of a prompt file: {input, label, datasource} for each entry."""
    rows = []
    for entry in entries:
        label = {"task": task, "answer": entry["answer"], "metadata": entry["metadata"]}
        rows.append(
            {
                "input": render(entry, shots, style),
                "label": json.dumps(label, sort_keys=True, default=str),
                "datasource": f"reasoning_gym/{task}",
            }
        )
    return rows


def parse_setting(text: str) -> tuple[str, object]:
    """'max_terms=2' -> ('max_terms', 2); values are JSON, anything else is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.data.reasoning_gym", description="Prompt set (jsonl) from a reasoning-gym task."
    )
    parser.add_argument("--task", required=True, help="reasoning-gym task, e.g. chain_sum")
    parser.add_argument("--out", required=True, help="jsonl file to write")
    parser.add_argument("--n", type=int, default=512, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=parse_setting, nargs="*", default=[], metavar="NAME=VALUE", help="settings of the task")
    parser.add_argument("--style", choices=STYLES, default="question")
    parser.add_argument("--shots", type=int, default=0, help="worked examples before each problem")
    parser.add_argument("--shot_seed", type=int, default=0, help="another choice of worked examples")
    parser.add_argument("--exclude", default=None, metavar="TEXT", help="drop problems whose question contains TEXT")
    args = parser.parse_args(argv)
    try:
        out = Path(args.out)
        if not out.name or out.is_dir():
            raise DataError(f"--out {args.out or repr('')}: name a file, e.g. {out / 'prompts.jsonl'}")
        if reason := why_unwritable(out.parent):
            raise DataError(f"--out {out}: {reason}: name a file in a directory that can be written to")
        rows = prompt_rows(
            args.task,
            args.n,
            seed=args.seed,
            config=dict(args.config),
            style=args.style,
            shots=args.shots,
            shot_seed=args.shot_seed,
            exclude=args.exclude,
        )
        write_jsonl(out, rows)
    except (DataError, OSError) as error:
        raise SystemExit(f"reasoning_gym: error: {error}") from None
    print(f"reasoning_gym: {len(rows)} prompts of {args.task} ({len({r['input'] for r in rows})} different) -> {args.out}")


if __name__ == "__main__":
    main()
