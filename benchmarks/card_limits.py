"""Longest prompt + response of each model on each card, and memory by cache mode and ZeRO stage, by the dry run's estimate.

    python benchmarks/card_limits.py MODEL [MODEL ...]      hub names or directories with a config.json; prints Markdown tables

Nothing is trained. QaRL in w4a16, Muon, gradient checkpointing, log-probs in chunks, one micro-batch of the longest response, learner and engine
taking turns on the same GPUs; on one GPU and with more than 20 B parameters, optimizer and master weights in main memory.
"""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from qarl_openrlhf.cli import dry_run, train_qarl
from qarl_openrlhf.planning.memory import complete, estimate
from qarl_openrlhf.planning.model_shape import ModelShape, cache_bytes
from qarl_openrlhf.planning.parts import GIB
from qarl_openrlhf.planning.positions import load_config
from qarl_openrlhf.quant.scheme import QuantScheme

CARDS = [(1, 24), (1, 48), (1, 80), (8, 24), (8, 48), (8, 80)]  # GPUs, GiB
STEP = 1024


def arguments(model: str, gpus: int, card: int, *flags: str):
    """train_qarl's checked arguments for the model on that many cards of that size (GiB)."""
    argv = [
        "--dry_run", "--dry_run_gpu_gb", str(card), "--actor.model_name_or_path", model, "--data.prompt_dataset", "x.jsonl",
        "--reward.remote_url", "r.py", "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "8",
        "--quant.scheme", "w4a16", "--objective.name", "tbpo", "--actor.optim", "muon", "--actor.muon.lr", "1e-6",
        "--actor.gradient_checkpointing_enable", "--actor.logprob_chunk", "2048", "--train.dynamic_batch_enable", "--train.colocate_all", "--vllm.enable_sleep",
        "--ds.enable_sleep", "--actor.num_gpus_per_node", str(gpus), "--ref.num_gpus_per_node", str(gpus), "--vllm.num_engines", str(gpus),
        "--ds.zero_stage", "3", "--quant.cache", "packed", "--vllm.gpu_memory_utilization", "0.5", "--vllm.engine_args", '{"max_num_seqs": 128}', *flags,
    ]  # fmt: skip
    with redirect_stdout(sys.stderr):
        return train_qarl.resolve(argv)[0]


def fits(args, shape: ModelShape, card: int, length: int) -> bool:
    args.data.max_len = args.train.max_tokens_per_gpu = length
    parts = estimate(args, shape)
    return not complete(parts, args, shape, card * GIB) and not any(one.problem(card * GIB) for one in parts)


def longest(args, shape: ModelShape, card: int, positions: int) -> int:
    """Largest multiple of 1024 tokens that fits, at most ``positions``; 0 if none does."""
    best = 0
    for length in range(STEP, positions + 1, STEP):
        if any(_with_share(args, share) and fits(args, shape, card, length) for share in (0.3, 0.4, 0.5, 0.6, 0.7)):
            best = length
    return best


def _with_share(args, share: float) -> bool:
    args.vllm.gpu_memory_utilization = share
    return True


def main(models: list[str]) -> None:
    print("| model | " + " | ".join(f"{gpus} x {card} GB" for gpus, card in CARDS) + " |")
    print("|---|" + "---|" * len(CARDS))
    shapes = {}
    for model in models:
        cells = []
        for gpus, card in CARDS:
            args = arguments(model, gpus, card)
            if model not in shapes:
                config = load_config(args)
                shapes[model] = ModelShape.of(*dry_run._planned(args, config), config)
            shape = shapes[model]
            args.ds.adam_offload = gpus == 1 or shape.parameters > 20e9
            length = longest(args, shape, card, 40960)
            cells.append(f"{length:,}" if length else "no")
        print(f"| {Path(model).name} | " + " | ".join(cells) + " |")
    print("\n| model | cache packed | dequant | none | " + " | ".join(f"states a GPU, ZeRO {s}" for s in (1, 2, 3)) + " |")
    print("|---|" + "---|" * 6)
    for model, shape in shapes.items():
        scheme = QuantScheme.parse("w4a16")
        cells = [f"{cache_bytes(scheme, mode, shape) / GIB:.1f}" for mode in ("packed", "dequant", "none")]
        for stage in (1, 2, 3):
            args = arguments(model, 8, 80, "--ds.zero_stage", str(stage))
            names = ("BF16 parameters", "master weights (FP32)", "optimizer state", "gradients")
            states = [p.bytes for one in estimate(args, shape) for p in one.parts if p.name in names or p.name.startswith("gradients of")]
            cells.append(f"{sum(states) / GIB:.1f}")
        print(f"| {Path(model).name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    main(parser.parse_args().models)
