"""``python -m qarl_openrlhf.cli.bench_step``: one training step by phase, every scheme beside BF16, on this machine.

    python -m qarl_openrlhf.cli.bench_step --shape 8b                                one GPU
    python -m qarl_openrlhf.cli.bench_step --shape 8b --only learner --layers 4,8,12 --ds.zero_stage 2
    torchrun --nproc-per-node 4 -m qarl_openrlhf.cli.bench_step --shape 8b --only learner --ds.zero_stage 3
    python -m qarl_openrlhf.cli.bench_step --shape 8b --dry_run --card H100 --card_gb 80      what is expected; starts nothing

Flags with a dot are train_qarl's and go to the learner. A run goes on where an earlier one with the same settings ended.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

import torch

from qarl_openrlhf import runtime
from qarl_openrlhf.bench import sync
from qarl_openrlhf.bench.step_results import Budget, Results, SettingsDiffer
from qarl_openrlhf.bench.step_run import Job, run_engines, run_learners, summarize
from qarl_openrlhf.bench.step_workload import KINDS
from qarl_openrlhf.cli.arguments import count
from qarl_openrlhf.cli.bench_sync import versions
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.quant.errors import QuantError

PARTS = ("rollout", "learner", "push")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args, extra = parser.parse_known_args(argv)
    _check_extra(parser, extra)
    args.extra = extra
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and args.only != ["learner"]:
        parser.error("under torchrun only the learner runs: add --only learner, and measure the rest without torchrun")
    try:
        device = "cuda" if args.dry_run and args.card else runtime.resolve_device(args.device)
        job = Job.of(args, device, world)
    except (ConfigError, QuantError, runtime.ResourceError, ValueError) as error:
        parser.error(str(error))
    if rank == 0:
        for note in job.notes:
            print(f"note: {note}", flush=True)
        print(job.describe(), flush=True)
    if args.dry_run:
        summarize(job, {}, job.learner_settings())
        return 0

    header = {
        "commands": [shlex.join(["python", "-m", "qarl_openrlhf.cli.bench_step", *_without(argv, ("--out", "--minutes"))])],
        "card": job.card,
        "versions": versions("torch", "vllm", "ray", "transformers", "deepspeed", "openrlhf"),
        "settings": job.settings(),
    } | ({"learner": job.learner_settings()} if "learner" in args.only else {})
    try:
        results = Results(Path(args.out) / f"step_{args.shape}{args.name}_{job.short_card}.json", header, writes=rank == 0)
    except SettingsDiffer as error:
        parser.error(str(error))
    budget = Budget(args.minutes)
    environment = runtime.set_environment(device)
    if {"rollout", "push"} & set(args.only):
        run_engines(job, results, budget, environment)
    if "learner" in args.only:
        run_learners(job, results, budget)
    if rank == 0:
        results.summary = summarize(job, results.pieces, results.header.get("learner", job.learner_settings()))
        results.write()
        for name, error in results.failures.items():
            print(f"failed: {name}: {error}")
        if budget.skipped:
            print(f"no time left within --minutes {args.minutes:g} for: {', '.join(budget.skipped)}; the same command goes on")
        print(f"wrote {results.path}", flush=True)
    return 1 if results.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_step", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="8b", choices=list(sync.SHAPES))
    parser.add_argument("--schemes", nargs="+", help="default: all that the device runs")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="measure these parts")
    parser.add_argument("--layers", type=_depths, help="depths of the learner, e.g. 4,8,12; default: all, or what fits")
    parser.add_argument("--rollout_layers", type=_depths, help="depths of the engine; default: the whole model")
    parser.add_argument("--prompt", type=count, default=512, help="tokens of a prompt")
    parser.add_argument("--response", type=count, default=2048, help="tokens of the longest response")
    parser.add_argument("--prompts", type=count, default=16, help="prompts of one GPU")
    parser.add_argument("--samples", type=count, default=8, help="responses a prompt")
    parser.add_argument("--update_samples", type=count, default=64, help="responses of one GPU in an optimizer step")
    parser.add_argument("--lengths", nargs="+", default=list(KINDS), choices=KINDS, help="all of the longest, or a mixture")
    parser.add_argument("--tokens", type=count, default=22528, help="tokens of a micro-batch of the learner")
    parser.add_argument("--repeats", type=count, default=2, help="measured rollouts of the learner a depth")
    parser.add_argument("--profile", action="store_true", help="one more rollout of the learner, for its kernels by device time")
    parser.add_argument("--pushes", type=count, default=5, help="measured pushes (default: 5)")
    parser.add_argument("--transport", default="auto", choices=("auto", "ipc", "nccl", "gloo"), help="auto: ipc, on a CPU gloo")
    parser.add_argument("--tp", type=count, default=1, help="tensor parallel size of the engine (with nccl)")
    parser.add_argument("--minutes", type=float, default=9, help="no piece is begun that would not end within these")
    parser.add_argument("--dry_run", action="store_true", help="say what would be measured and the roofline of each phase")
    parser.add_argument("--card", help="with --dry_run: the card to plan for (H100, H200, A100)")
    parser.add_argument("--card_gb", type=float, help="memory to plan for, GiB (default: the visible card's)")
    parser.add_argument("--out", default="benchmarks/results", help="directory of step_<shape>_<card>.json")
    parser.add_argument("--name", default="", help="suffix of the result file's name, for other settings of the same shape")
    return parser


def _check_extra(parser: argparse.ArgumentParser, extra: list[str]) -> None:
    """Flags of train_qarl have a dot; anything else is a typing error, and said before minutes are spent."""
    for word in extra:
        if word.startswith("--") and "." not in word and word.split("=")[0] != "--preset":
            parser.error(f"unknown flag {word} (flags for the learner have a dot, e.g. --ds.zero_stage)")
    if extra and not extra[0].startswith("--"):
        parser.error(f"unexpected word {extra[0]!r}")


def _depths(text: str) -> list[int]:
    try:
        depths = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of layers, e.g. 4,8,12") from None
    if min(depths) < 1 or len(set(depths)) != len(depths):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of layers are 1 or more and differ")
    return sorted(depths)


def _without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """The command line without flags that say nothing about the figures."""
    kept, skip = [], False
    for word in words:
        if not skip and word not in flags and not word.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(word)
        skip = word in flags
    return kept


if __name__ == "__main__":
    sys.exit(main())
