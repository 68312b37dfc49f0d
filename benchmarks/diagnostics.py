"""What the always-on diagnostics cost: milliseconds a micro-batch, and microseconds a token; writes nothing.

    python benchmarks/diagnostics.py [--device cuda] [--threads 1]

The share of a step is in every run: timing/diagnostics over timing/step_total of metrics.jsonl.
"""

import argparse
import time
import types

import torch

from qarl_openrlhf.metrics.accumulate import Sums
from qarl_openrlhf.metrics.diagnostics import Diagnostics
from qarl_openrlhf.objectives import build_objective

SHAPES = ((16, 64), (8, 1024), (4, 16384))


def experience(rows: int, width: int, device: str):
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(rows, width, generator=generator) ** 2
    batch = types.SimpleNamespace(
        sequences=torch.randint(0, 50_000, (rows, width + 1), generator=generator),
        attention_mask=torch.ones(rows, width + 1, dtype=torch.long),
        action_mask=(torch.arange(width) >= width // 8).expand(rows, width).clone(),
        action_log_probs=old,
        rollout_log_probs=old + 0.05 * torch.randn(rows, width, generator=generator),
        advantages=torch.randn(rows, 1, generator=generator).expand(rows, width).clone(),
        rewards=torch.rand(rows, generator=generator),
    )
    batch = types.SimpleNamespace(**{name: value.to(device) for name, value in vars(batch).items()})
    return batch, batch.action_log_probs + 0.1 * torch.randn_like(batch.action_log_probs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    objective = build_objective("tbpo", band_scale=8.0)
    print("| micro-batch | before training, ms | a training pass, ms | end of a rollout, ms | µs a token |\n|---|---|---|---|---|")
    for rows, width in SHAPES:
        batch, current = experience(rows, width, args.device)
        inputs = (current, batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask)
        best = None
        for _ in range(args.repeats):
            watch = Diagnostics(torch.device(args.device))
            watch.begin(objective)
            times = []
            for work in (
                lambda: watch.sampled(batch, Sums()),
                lambda: watch.updated(batch, current, objective(*inputs).tokens, 1),
                watch.end,
            ):
                before = watch.seconds
                started = time.perf_counter()
                work()
                # the objective is not a diagnostic; end() has its own clock
                times.append(watch.seconds - before if len(times) < 2 else time.perf_counter() - started)
            best = times if best is None or sum(times) < sum(best) else best
        tokens = int(batch.action_mask.sum())
        shown = " | ".join(f"{1e3 * t:.2f}" for t in best)
        print(f"| [{rows}, {width}] | {shown} | {1e6 * (best[0] + best[1]) / tokens:.2f} |")


if __name__ == "__main__":
    main()
