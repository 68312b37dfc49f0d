"""Held-out accuracy of arms at some steps, and their gains where all arms of a scheme began as one policy.

    python benchmarks/heldout_gains.py runs/smollm2_causes/* --steps 40 50

A directory is a setting, with its seeds below it. The start of a scheme is the mean over the seeds of all settings: each evaluation of it
samples anew, and half of what seeds differ by would else be taken for gain.
"""

import argparse
from pathlib import Path
from statistics import fmean, stdev

from qarl_openrlhf.report import load_run
from qarl_openrlhf.report.discover import identify
from qarl_openrlhf.metrics.writer import accuracies


def accuracy(run) -> dict[int, float]:
    return {row["step"]: fmean(row[name] for name in accuracies(row)) for row in run.evaluations}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--steps", nargs="+", type=int, required=True, help="evaluations to average; a seed that has none of them is left out")
    args = parser.parse_args(argv)
    starts, arms = {}, {}
    for directory in args.directories:
        for path in sorted(directory.rglob("metrics.jsonl")):
            run, who = load_run(path.parent), identify(path.parent)
            values = accuracy(run)
            starts.setdefault(who.scheme, {})[who.seed] = values[0]
            if there := [values[step] for step in args.steps if step in values]:
                arms.setdefault((directory.name, who.objective, who.scheme), []).append((fmean(there), run))
    for (setting, objective, scheme), seeds in arms.items():
        start, values = fmean(starts[scheme].values()), [value for value, _ in seeds]
        spread = f" +- {stdev(values):.3f}" if len(values) > 1 else ""
        changed = fmean(fmean(run.series("sync/changed_code_frac")[1][1:] or [0.0]) for _, run in seeds)
        apart = fmean(fmean(run.series("mismatch/abs_logp_mean")[1][-5:]) for _, run in seeds)
        print(
            f"{setting} {objective} {scheme}: {len(values)} seeds, start {start:.3f}, steps {' '.join(map(str, args.steps))} {fmean(values):.3f}{spread}, "
            f"gain {fmean(values) - start:+.3f}, codes changed a publish {changed:.3%}, mismatch of the last five steps {apart:.4f}"
        )


if __name__ == "__main__":
    main()
