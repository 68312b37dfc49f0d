"""Compare objectives, schemes and seeds: one training run each, then tables and pictures.

    python -m qarl_openrlhf.cli.ablate_objectives --arms tbpo,grpo_tis --schemes bf16,w4a16:rollout,w4a16 --seeds 0,1 \\
        --out runs/ablation <flags of train_qarl, the same for all runs>
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from functools import partial
from pathlib import Path

from qarl_openrlhf.ablation.execute import execute, only_one_in
from qarl_openrlhf.ablation.launch import launch_here, ray_job_launcher
from qarl_openrlhf.ablation.plan import Plan, PlanError, PlannedRun, make_plan
from qarl_openrlhf.ablation.status import entries_so_far, is_finished
from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.cli.ending import SignalEnding
from qarl_openrlhf.cli.flags import add_flags
from qarl_openrlhf.cli.host import HostCommandLine
from qarl_openrlhf.files import why_unwritable
from qarl_openrlhf.objectives import ObjectiveError
from qarl_openrlhf.quant import QuantError

COMMAND = "ablate_objectives"
USAGE = "%(prog)s --arms ... --schemes ... --seeds ... [flags of train_qarl]"
PAPER_ARMS = "tbpo,gspo,mis_gspo,positive_grpo,onpolicy_grpo,dual_clip,sapo,grpo_tis"


def main(argv: list[str] | None = None) -> None:
    with SignalEnding("ablate_objectives") as ending:
        _main(argv, ending)


def _main(argv: list[str] | None, ending: SignalEnding) -> None:
    args, shared = _parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        plan = _plan(args, shared)
        for note in plan.notes:
            print(f"note: {note}", file=sys.stderr)
        if args.dry_run:
            print("\n".join(" ".join(map(_quoted, run.command)) for run in plan.runs))
            return
        failed = _run(args, plan, ending)
    except PlanError as error:
        raise SystemExit(f"ablate_objectives: error: {error}") from None
    if failed:
        raise SystemExit(f"ablate_objectives: error: {len(failed)} of {len(plan.runs)} runs failed: the same command tries them again")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.cli.ablate_objectives",
        description="One training run for each arm, scheme and seed, each in a process and directory of its own; then summary.csv, summary.md "
        "and pictures. A second call with the same flags does what is not finished. All other flags go to every run; --objective.* "
        "ones only to the arms that have them.",
        allow_abbrev=False,
    )
    parser.add_argument("--arms", type=_words, default=PAPER_ARMS, help="presets or objectives, path/to/file.py:function, or openrlhf (its own loss); default: %(default)s")
    parser.add_argument("--schemes", type=_words, default=["w4a16"], help="values of --quant.scheme; default: w4a16")
    parser.add_argument("--seeds", type=_seeds, default=[0], help="values of --train.seed; default: 0")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="gets ARM/SCHEME/seedN for each run; default: %(default)s")
    parser.add_argument("--keep_models", action="store_true", help="keep the models and checkpoints of finished runs")
    parser.add_argument("--ray_address", default=None, metavar="URL", help="submit the runs as jobs to this Ray cluster (http://HOST:8265)")
    parser.add_argument("--parallel", type=int, default=1, help="how many Ray jobs at a time")
    parser.add_argument("--dry_run", action="store_true", help="print the train_qarl commands, one a line, and start nothing")
    return parser


def _words(text: str) -> list[str]:
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words:
        raise argparse.ArgumentTypeError("is empty: give one or more, with commas between them")
    return words


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers with commas between them, e.g. 0,1") from None


def _plan(args, shared: list[str]) -> Plan:
    """Every command, with all flags checked as train_qarl checks them; a wrong one ends the process before anything starts."""
    if reason := why_unwritable(args.out):
        raise PlanError(f"--out {args.out}: {reason}: name a directory that can be written to")
    if args.parallel < 1:
        raise PlanError(f"--parallel {args.parallel}: give 1 or more")
    if args.parallel > 1 and not args.ray_address:
        raise PlanError("--parallel needs --ray_address: without a cluster the runs share one machine and go one after another")
    host = HostCommandLine()
    host.parser.prog = COMMAND
    try:
        add_flags(host.parser, own_objective=[arm for arm in args.arms if ".py:" in arm])
    except ObjectiveError as error:
        raise PlanError(f"--arms: {error}") from None
    host.parser.usage = USAGE
    flat = host.parser.parse_args(shared)
    samples = getattr(flat, "rollout.batch_size") * getattr(flat, "rollout.n_samples_per_prompt")
    plan = make_plan(args.arms, args.schemes, args.seeds, shared, args.out.resolve(), rollout_samples=samples)
    if not args.ray_address:  # a cluster may have GPUs that this machine lacks: its train_qarl checks then
        for run in plan.runs[: len(args.arms) * len(args.schemes)]:
            train_qarl.resolve(run.flags, command=COMMAND, usage=USAGE, told=partial(_told, run))
    return plan


def _told(run: PlannedRun, error: Exception | str) -> str:
    """An error of a run's flags, by the flags of this command that they were made of; those of train_qarl are the user's own."""
    text = str(error).replace("--quant.scheme ", "--schemes ")
    text = re.sub(r"--(?:objective\.name|preset)\b(?: [^\s:]+)?", lambda _: f"--arms {run.identity.objective}", text)
    return f"--schemes {run.identity.scheme}: {text}" if isinstance(error, QuantError) else text


def _quoted(word: str) -> str:
    """For a shell, on one line: a newline (of --rollout.stop) becomes $'\\n'."""
    return shlex.quote(word) if word.isprintable() else "$'" + repr(word)[1:-1].replace("'", "\\'") + "'"


def _run(args, plan: Plan, ending: SignalEnding) -> list:
    from qarl_openrlhf.report.comparison import write_comparison
    from qarl_openrlhf.report.discover import entries_below
    from qarl_openrlhf.report.summary import write_summary

    with only_one_in(args.out) as lock:
        for run in plan.runs:
            is_finished(run)  # refuses directories of other flags before the first run starts
        launch = ray_job_launcher(args.ray_address) if args.ray_address else partial(launch_here, lock=lock)
        ending.advice = lambda: ": the same command goes on with the runs that are not finished"
        failed = execute(
            plan.runs,
            launch,
            parallel=args.parallel,
            keep_models=args.keep_models,
            done=lambda run: write_summary(entries_so_far(args.out), args.out),
        )
        written = write_comparison(entries_below(args.out), args.out)
    print((args.out / "summary.md").read_text(encoding="utf-8"))
    print("written: " + ", ".join(str(path) for path in written))
    return failed


if __name__ == "__main__":
    main()
