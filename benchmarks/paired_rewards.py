"""Mean rewards of runs that were given the same prompts, and how far one of them is from each other one, step by step.

    python benchmarks/paired_rewards.py runs/smollm2 --of seed0-w4a16-g64-tbpo --first 5 --last 15

The last steps are those of the steps that all runs have. The error is the standard error of the mean of the steps' differences.
"""

import argparse
from pathlib import Path

from qarl_openrlhf.report import load_run
from qarl_openrlhf.report.runs import mean, standard_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the runs")
    parser.add_argument("--of", required=True, help="part of the path of the run that the others are taken from")
    parser.add_argument("--first", type=int, default=5)
    parser.add_argument("--last", type=int, default=15)
    args = parser.parse_args()
    found = sorted(path.parent for path in args.directory.rglob("metrics.jsonl"))
    rewards = {str(path.relative_to(args.directory)): load_run(path).series("rollout/reward_mean")[1] for path in found}
    [ours] = [name for name in rewards if args.of in name]
    steps = min(map(len, rewards.values()))
    last = {name: values[steps - args.last : steps] for name, values in rewards.items()}
    for name, values in rewards.items():
        apart = [a - b for a, b in zip(last[ours], last[name], strict=True)]
        print(
            f"{name}: first {args.first} {mean(values[: args.first]):.3f}, steps {steps - args.last + 1}-{steps} {mean(last[name]):.3f}, "
            f"{args.of} minus this {mean(apart):+.3f} +- {standard_error(apart):.3f}"
        )


if __name__ == "__main__":
    main()
