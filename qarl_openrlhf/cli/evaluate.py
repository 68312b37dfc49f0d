"""Benchmarks of a model: `python -m qarl_openrlhf.cli.evaluate MODEL --tasks aime24 math500 --out DIR`, and tables of several.

MODEL: a Hugging Face directory, an export, a hub name or a DeepSpeed checkpoint (with --model); --scheme quantizes BF16 weights
first. Samples k responses an item at temperature 0.6; a run that was stopped goes on where it was.
`python -m qarl_openrlhf.cli.evaluate --table [NAME=]DIR ...` prints one table of runs that are done.
"""

from __future__ import annotations

if __name__ == "__main__":
    from qarl_openrlhf.cli.ending import end_at_signals

    end_at_signals("evaluate")

import argparse
import hashlib
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from qarl_openrlhf.cli.ending import SignalEnding, own_process
from qarl_openrlhf.cli.prepare_data import TEMPLATE, template_of
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.data.sources import CODE, EVAL, on_hub
from qarl_openrlhf.engine.offline import ENGINES
from qarl_openrlhf.evaluation import harness, records, sandbox, table
from qarl_openrlhf.evaluation.code_items import CodeItem
from qarl_openrlhf.evaluation.items import DEFAULT_K, Settings, kind_of, load_items
from qarl_openrlhf.evaluation.scores import figure
from qarl_openrlhf.files import made_directory, scratch_directory, why_unwritable
from qarl_openrlhf.planning import numbers
from qarl_openrlhf.preflight import hub
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.scheme import QuantScheme

MAX_TOKENS = 16384
SAMPLES = 64  # pieces of a file of weights that are looked at to know it again
PROMPT_TOKENS = 2048  # the paper's; prompt and response together are the engine's max_model_len
RANGES = {
    **dict.fromkeys(("k", "limit", "max_tokens", "tp", "workers"), numbers.COUNT),
    **dict.fromkeys(("top_p", "gpu_memory_utilization"), numbers.SHARE),
    "temperature": numbers.NOT_NEGATIVE,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.cli.evaluate", description="Samples and scores benchmarks, or prints a table of evaluated runs."
    )
    add = parser.add_argument
    add("source", nargs="?", metavar="MODEL", help="Hugging Face directory, export, hub name or DeepSpeed checkpoint")
    add("--table", nargs="+", metavar="[NAME=]DIR", help="print the table of these evaluation directories and end")
    add("--out", help="directory for samples and scores; one with the same settings is continued")
    known = f"{', '.join([*EVAL, *CODE])}, or files of their columns; {', '.join(harness.TASKS)} (lm-eval), or NAME=DIR"
    add("--tasks", nargs="+", default=list(EVAL), metavar="NAME|NAME=FILE", help=f"{known} (default: {' '.join(EVAL)})")
    add("--input_key", metavar="COLUMN", help="of own files: the problem's column (default: problem, question, prompt or input)")
    add("--label_key", metavar="COLUMN", help="of own files: the answer's (default: label, final_answer, answer, reward_model or solution)")
    add("--k", type=int, default=None, help="samples an item (default: 32 of AIME and AMC, 4 of the others; LiveCodeBench's score is pass@k)")
    add("--temperature", type=float, default=0.6, help="default: %(default)s")
    add("--top_p", type=float, default=1.0, help="default: %(default)s")
    add("--max_tokens", type=int, default=MAX_TOKENS, help="of a response (default: %(default)s; lm-eval's tasks have their own)")
    add("--template", type=template_of, default=TEMPLATE, help="prompt of mathematics, with {problem} (default: %(default)r)")
    add("--chat", choices=("auto", "on", "off"), default="auto", help="apply the tokenizer's chat template (auto: if it has one)")
    add("--scheme", default=None, help="quantize BF16 weights to this first: w4a16[:gN], w8a8, fp8, w4a8")
    add("--engine", default="auto", choices=ENGINES, help="vLLM's own kernels or our method for CPUs")
    add("--model", default=None, help="of a DeepSpeed checkpoint: the model it was trained from")
    add("--tag", default=None, help="of a DeepSpeed checkpoint: which one")
    add("--limit", type=int, default=None, help="only the first N items of each task")
    add("--seed", type=int, default=0, help="of the samples (default: 0)")
    add("--tp", type=int, default=1, help="tensor-parallel size of the engine")
    add("--gpu_memory_utilization", type=float, default=None, help="share of the device's memory (default: 0.9; on a CPU 0.3)")
    add("--workers", type=int, default=max(1, min(8, len(os.sched_getaffinity(0)))), help="judging processes (default: %(default)s)")
    return parser


def check(args) -> None:
    """DataError for what would fail later."""
    if not args.source or not args.out:
        raise DataError("MODEL and --out are needed (or --table DIR ...)")
    if why := why_unwritable(args.out):
        raise DataError(f"--out {args.out}: {why}")
    for flag, allowed in RANGES.items():
        value = getattr(args, flag)
        if value is not None and not allowed.holds(value):
            raise DataError(f"--{flag} {value:g}: use {allowed}")
    if args.scheme is not None:
        QuantScheme.parse(args.scheme.removesuffix(":rollout"))
    if args.temperature == 0 and args.k != 1:
        raise DataError("--temperature 0 gives k equal samples: add --k 1")
    if theirs := [task for task in args.tasks if harness.name_of(task)]:
        harness.require(theirs)
    for flag in ("input_key", "label_key"):
        if getattr(args, flag) is not None and (known := [task for task in args.tasks if task in EVAL | CODE or harness.name_of(task)]):
            raise DataError(f"--{flag} is of own files, and {known[0]} has columns of its own: a second command with the same --out")


def run(args) -> dict:
    """Everything; returns the summary."""
    check(args)
    theirs = [task for task in args.tasks if harness.name_of(task)]
    if theirs and len(theirs) < len(args.tasks):
        raise DataError(f"--tasks {' '.join(theirs)} are lm-eval's and need an engine of their own: a second command with the same --out")
    models = {"MODEL": args.source, "--model": args.model}
    remote = [wanted for flag, name in models.items() for wanted in hub.model_on_hub(flag, name)]
    remote += harness.on_hub(theirs) if theirs else [w for task in args.tasks for w in on_hub(task, EVAL | CODE, "--tasks")]
    hub.settle_names(remote, models.values())
    tasks = [] if theirs else [load_items(task, args.limit, args.input_key, args.label_key) for task in args.tasks]
    names = [items[0].task for items in tasks]
    if twice := [argument for argument, name in zip(args.tasks, names, strict=False) if names.count(name) > 1]:
        raise DataError(f"--tasks {' '.join(twice)}: two sets have one name, and with it one file of samples; write NAME=FILE")
    if programs := [item for items in tasks for item in items if isinstance(item, CodeItem)]:
        sandbox.require()
        for item in programs:  # a broken one is named now, and not after its programs are sampled
            item.read_tests()
    if theirs:
        harness.check_data(theirs)
    with ExitStack() as stack:
        out = stack.enter_context(made_directory(args.out))
        stack.enter_context(records.unclaimed_without_samples(out))
        scratch = stack.enter_context(scratch_directory(out, ".weights-"))
        directory, scheme = weights(args, scratch)
        choice = engine_choice(args, directory, own=not theirs)
        settings = claim_settings(args, directory, scheme, choice, own=not theirs)
        if theirs:
            for scores in harness.run(directory, theirs, out, limit=args.limit, chat=args.chat == "on", **choice):
                summary = join_summary(out, scores)
        else:
            summary = join_summary(out, sampled(args, directory, settings, tasks, choice))
    return summary


def join_summary(out: Path, scores: dict[str, dict]) -> dict:
    """Write summary.json: scores that are there, and these."""
    path = out / "summary.json"
    scores = (records.read_summary(path) if path.is_file() else {}) | scores
    summary = {"tasks": scores, "average": fmean(figure(each)[1] for each in scores.values())}
    records.write_json(path, summary)
    return summary


def weights(args, scratch: Path) -> tuple[str, str]:
    """(directory that vLLM can load, scheme string), exported to `scratch` where needed."""
    from qarl_openrlhf.engine.offline import scheme_of
    from qarl_openrlhf.export.directory import bf16_directory, deepspeed_step, export_directory, load_learner
    from qarl_openrlhf.quant import finite

    if step := deepspeed_step(args.source, args.tag):
        print("\n".join(about_checkpoint(args, step)), file=sys.stderr, flush=True)
    directory = bf16_directory(args.source, scratch / "bf16", model=args.model, tag=args.tag)
    if directory == args.source:  # what is exported here is checked there
        finite.require_in_files(directory)
    if args.scheme is None:
        return directory, str(scheme_of(directory))
    scheme = QuantScheme.parse(args.scheme.removesuffix(":rollout"))
    if not scheme.quantized:
        return directory, "bf16"
    model, _ = load_learner(directory, scheme, tp=args.tp)
    export_directory(model, directory, scratch / "quantized", scheme)
    return str(scratch / "quantized"), str(scheme)


def about_checkpoint(args, step: Path) -> list[str]:
    """Lines: which checkpoint of a run this is, and that its training was in another scheme, which is a choice, or a flag left out."""
    from qarl_openrlhf.export.training_checkpoint import trained_in, which

    lines = [which(args.source, step, args.tag)]
    trained, scheme = trained_in(step), QuantScheme.parse((args.scheme or "bf16").removesuffix(":rollout"))
    if trained is not None and trained.aligned and scheme != trained:
        lines.append(f"note: it was trained in {trained} and is evaluated in {scheme}; --scheme {trained} evaluates what was trained")
    return lines


def weight_files(source: str, model: str | None, tag: str | None) -> str:
    """Which files a local model's weights are: another checkpoint may be at the same path by the time a run goes on. "" on the hub."""
    from qarl_openrlhf.export.training_checkpoint import find_deepspeed, is_huggingface

    path = Path(source)
    if not path.is_dir():
        return ""
    directory, of = (path, "") if is_huggingface(path) else (find_deepspeed(path, tag), f"{tag or 'latest'} of {model}, ")
    files = sorted(p for pattern in ("*.safetensors", "*.bin", "*.pt") for p in directory.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            for start in sorted({size * i // SAMPLES for i in range(SAMPLES)}):  # all of it would take minutes of a large model
                opened.seek(start)
                digest.update(opened.read(2**16))
    return f"{of}{directory.name}, {len(files)} files, sha256 of a sample {digest.hexdigest()[:12]}"


def engine_choice(args, directory: str, *, own: bool = True) -> dict:
    """Arguments of `engine_settings`. Where prompt and response exceed the model's positions, prompts get less room.

    own: tasks that our runner samples, with --max_tokens; lm-eval's have lengths of their own.
    """
    from transformers import AutoConfig

    length = PROMPT_TOKENS + (args.max_tokens if own else MAX_TOKENS)
    positions = getattr(AutoConfig.from_pretrained(directory).get_text_config(), "max_position_embeddings", None) or length
    if own and args.max_tokens >= positions:
        works = positions - min(PROMPT_TOKENS, positions // 4)
        raise DataError(
            f"--max_tokens {args.max_tokens}: {args.source} has {positions} positions for prompt and response together: "
            f"use --max_tokens {works} or less"
        )
    choice = {"engine": args.engine, "max_model_len": min(length, positions), "tp": args.tp, "seed": args.seed}
    return choice | {"memory": args.gpu_memory_utilization}


def claim_settings(args, directory: str, scheme: str, choice: dict, *, own: bool = True) -> Settings:
    """The settings of this run; DataError, before an engine starts, if --out holds samples of others. own: see `engine_choice`."""
    from qarl_openrlhf.engine.offline import engine_settings
    from qarl_openrlhf.export.directory import deepspeed_step
    from qarl_openrlhf.preflight.tokenizer_files import load_tokenizer

    # The user's own directory, and not the one written here, which has no tokenizer where that one's could not be read.
    flag, name = ("--model ", args.model) if deepspeed_step(args.source, args.tag) else ("", args.source)
    tokenizer = load_tokenizer(f"{flag}{name}", name)
    engine = engine_settings(directory, **choice)[1]
    chat = args.chat == "on" or (args.chat == "auto" and bool(tokenizer.chat_template))
    settings = Settings(
        model=args.source, scheme=scheme, engine=engine, temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens,
        template=args.template, chat=chat, seed=args.seed, weights=weight_files(args.source, args.model, args.tag),
    )  # fmt: skip
    records.claim(Path(args.out), settings, None if own else harness.SETTINGS)
    return settings


def sampled(args, directory: str, settings: Settings, tasks: list, choice: dict) -> dict[str, dict]:
    """Scores of the tasks that our runner samples."""
    from qarl_openrlhf.engine.offline import open_engine
    from qarl_openrlhf.evaluation.grade import CodeGrader, GymGrader, MathGrader
    from qarl_openrlhf.evaluation.sample import Runner
    from qarl_openrlhf.rewards.pool import JudgePool

    llm, _ = open_engine(directory, **choice)
    judges = JudgePool(size=args.workers)
    try:
        graders = {"code": CodeGrader(args.workers), "gym": GymGrader(), "mathematics": MathGrader(judges)}
        scores = {}
        for items in tasks:
            runner = Runner(llm, settings, Path(args.out), graders[kind_of(items)])
            scores[items[0].task] = runner.run(items, args.k or DEFAULT_K.get(items[0].task, 4))
        return scores
    finally:
        judges.close()


def main(argv: list[str] | None = None) -> None:
    with SignalEnding("evaluate") as ending:
        _main(argv, ending)


def _main(argv: list[str] | None, ending: SignalEnding) -> None:
    args = make_parser().parse_args(argv)
    try:
        if args.table:
            print(table.markdown(table.read_runs(args.table)))
            return
        if args.out:
            ending.advice = lambda: ": the same command goes on where it was" if any(Path(args.out).glob("*.jsonl")) else ""
        summary = run(args)
    except (DataError, QuantError, ConfigError) as error:
        raise SystemExit(f"evaluate: error: {error}") from None
    print(json.dumps(summary, indent=2))
    print(table.markdown(table.read_runs([args.out])))


if __name__ == "__main__":
    own_process(main)
