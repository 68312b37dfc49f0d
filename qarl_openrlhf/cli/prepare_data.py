"""Training prompts and evaluation sets as jsonl: `python -m qarl_openrlhf.cli.prepare_data --out DIR [--train ...] [--eval ...]`.

    DIR/train.jsonl           training prompts: no repeats, nothing that an evaluation set has
    DIR/eval/NAME.jsonl       one file an evaluation set
    DIR/summary.json          how many rows came, stayed and went, and why

Columns: prompt, label, source, problem (the prompt without the instruction), datasource (= source, under OpenRLHF's name).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from string import Formatter

from qarl_openrlhf.data.math_rows import problem_and_label
from qarl_openrlhf.data.overlap import OverlapIndex, words
from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.data.sources import EVAL, TRAIN, load_rows, on_hub, place_of
from qarl_openrlhf.files import atomic_file, why_unwritable
from qarl_openrlhf.lines import write_jsonl

TEMPLATE = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def make_rows(name: str, raw: list[dict], template: str, place: str) -> list[dict]:
    """Rows in our columns; DataError names their place (a file, or a set on the hub) and the row."""
    rows = []
    for number, row in enumerate(raw, 1):
        problem, label = problem_and_label(row, f"{place}, row {number}")
        source = str(row.get("source") or name)
        prompt = template.format(problem=problem)
        rows.append({"prompt": prompt, "label": label, "source": source, "problem": problem, "datasource": source})
    if not rows:
        raise DataError(f"{place} has no rows")
    return rows


def without_repeats(rows: list[dict]) -> tuple[list[dict], Counter]:
    """One row a problem; problems that come with different labels go altogether: one of the labels is wrong."""
    labels: dict[tuple, set[str]] = {}
    for row in rows:
        labels.setdefault(words(row["problem"]), set()).add("".join(row["label"].split()))
    kept, seen, gone = [], set(), Counter()
    for row in rows:
        key = words(row["problem"])
        reason = "contradicting labels" if len(labels[key]) > 1 else "repeated" if key in seen else None
        seen.add(key)
        if reason:
            gone[reason] += 1
        else:
            kept.append(row)
    return kept, gone


def without_overlap(rows: list[dict], index: OverlapIndex) -> tuple[list[dict], Counter]:
    """Rows that no evaluation set has; counts of the others by set."""
    found = [index.find(row["problem"]) for row in rows]
    gone = Counter(f"in {name}" for name in found if name)
    return [row for row, name in zip(rows, found, strict=True) if not name], gone


def ask_hub(args) -> None:
    """DataError, within seconds, for sets on the hub where it cannot be asked; where all are files it is not asked at all."""
    remote = on_hub(args.train, TRAIN, "--train") + [wanted for argument in args.eval for wanted in on_hub(argument, EVAL, "--eval")]
    if not remote:
        return
    from qarl_openrlhf.config import ConfigError
    from qarl_openrlhf.preflight.hub import settle_names

    try:
        settle_names(remote)
    except ConfigError as error:
        given = args.train not in TRAIN and args.eval == list(EVAL)
        more = ". The evaluation sets are the hub's unless --eval names files; --eval alone means none" if given else ""
        raise DataError(f"{error}{more}") from None


def prepare(args) -> dict:
    """Write all files; returns the summary."""
    out = Path(args.out)
    if reason := why_unwritable(out):
        raise DataError(f"--out {out}: {reason}: name a directory that can be written to")
    ask_hub(args)
    evaluation = {}
    for argument in args.eval:
        name, raw = load_rows(argument, EVAL, "--eval")
        if name in evaluation:
            raise DataError(f"--eval names '{name}' twice; give one of them another name: NAME=FILE")
        rows = make_rows(name, raw, args.template, place_of(argument, EVAL))
        evaluation[name] = [row | {"source": name, "datasource": name} for row in rows]
    summary = {"eval": {name: len(rows) for name, rows in evaluation.items()}}
    train = None
    if args.train != "none":
        name, raw = load_rows(args.train, TRAIN, "--train")
        rows = make_rows(name, raw, args.template, place_of(args.train, TRAIN))
        train, gone = without_repeats(rows)
        index = OverlapIndex((set_name, row["problem"]) for set_name, rows_ in evaluation.items() for row in rows_)
        train, more = without_overlap(train, index)
        if not train:
            raise DataError(f"--train {args.train}: no row is left of {len(rows)} ({dict(gone + more)})")
        summary["train"] = {"name": name, "rows": len(rows), "kept": len(train), "dropped": dict(gone + more)}
    for name, rows in evaluation.items():
        write_jsonl(out / "eval" / f"{name}.jsonl", rows)
    if train is not None:
        write_jsonl(out / "train.jsonl", train)
    with atomic_file(out / "summary.json") as part:
        part.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def template_of(text: str) -> str:
    """A template must hold {problem} once; \\n stands for a line's end."""
    text = text.replace("\\n", "\n")
    try:
        fields = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; other braces than {{problem}}'s are doubled: \\boxed{{{{}}}}") from None
    if fields != [("problem", "", None)]:
        raise argparse.ArgumentTypeError("it needs {problem} exactly once, just so, and other braces doubled: \\boxed{{}}")
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.cli.prepare_data",
        description="Writes training prompts and evaluation sets as jsonl, the training set without what the evaluation sets have.",
    )
    parser.add_argument("--out", required=True, help="directory to write to")
    parser.add_argument("--train", default="openr1-math-46k", metavar="NAME|FILE|none", help="training set (default: %(default)s, from the hub); with a FILE give --eval, too")
    parser.add_argument(
        "--eval",
        nargs="*",
        default=list(EVAL),
        metavar="NAME|NAME=FILE",
        help=f"evaluation sets, which the training set is cleared of (default: {' '.join(EVAL)}, from the hub; --eval alone: none); "
        "files: .jsonl, .json, .parquet, .csv. Without a network, both --train and --eval must name files",
    )
    parser.add_argument("--template", default=TEMPLATE, type=template_of, help="prompt, with {problem} (default: %(default)r)")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    try:
        print(json.dumps(prepare(args), indent=2))
    except (DataError, OSError) as error:
        raise SystemExit(f"prepare_data: error: {error}") from None


if __name__ == "__main__":
    main()
