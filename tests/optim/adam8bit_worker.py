"""Trains a tiny Qwen3 under DeepSpeed with 8-bit and with 32-bit moments, saves half way, and trains the second half again.

usage: python -m tests.optim.adam8bit_worker RANK WORLD_SIZE PORT OUT_FILE STAGE
"""

import os
import sys

import torch

from qarl_openrlhf import patches

STEPS, MICRO, LENGTH = 6, 2, 16


def run(directory: str, stage: int, world: int, rank: int, bits: int, out: str) -> dict:
    import deepspeed
    from openrlhf.models import Actor

    from qarl_openrlhf.actors import asleep
    from qarl_openrlhf.actors.strategy import make_strategy
    from qarl_openrlhf.cli import train_qarl
    from tests.e2e.conftest import argv

    flags = {
        "device": "cpu", "actor.model_name_or_path": directory, "data.prompt_dataset": "none.jsonl", "reward.remote_url": "none.py",
        "vllm.num_engines": 1, "actor.num_gpus_per_node": world, "ref.num_gpus_per_node": 1, "ds.zero_stage": stage,
        "train.micro_batch_size": MICRO, "train.batch_size": MICRO * world, "rollout.batch_size": MICRO * world,
        "actor.adam.lr": 1e-3, "actor.adam.weight_decay": 0.1, "actor.adam.state_bits": bits, "quant.scheme": "w4a16:g32",
    }  # fmt: skip
    args, _, _ = train_qarl.resolve(argv(flags))
    strategy = make_strategy(args)
    strategy.setup_distributed()
    actor = Actor(directory, attn_implementation="eager", ds_config=strategy.get_ds_train_config())
    cfg = dict(
        optim="adam", muon=vars(args.actor.muon), adam=vars(args.actor.adam), lr_scheduler="constant", lr_warmup_ratio=0.0,
        min_lr_ratio=0.1, max_norm=1.0, scheduler_steps=100,
    )  # fmt: skip
    actor, optimizer, scheduler = strategy.prepare((actor, cfg))
    engine = actor.model
    engine.train()
    data = torch.randint(3, 500, (world, MICRO, LENGTH), generator=torch.Generator().manual_seed(7))[rank]

    def step() -> float:
        loss = engine(input_ids=data, labels=data).loss
        strategy.backward(loss, actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler)
        return loss.item()

    def parameters() -> dict[str, torch.Tensor]:
        live = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(live.values()), enabled=stage == 3):
            return {name: p.detach().clone() for name, p in live.items()}

    first = [step() for _ in range(STEPS // 2)]
    engine.save_checkpoint(out, tag="half")
    second, after = [step() for _ in range(STEPS // 2)], parameters()
    engine.load_checkpoint(out, tag="half")
    asleep.offload(engine)  # --ds.enable_sleep: what comes back is what went
    asleep.reload(engine)
    again, resumed = [step() for _ in range(STEPS // 2)], parameters()
    moments = [
        t for state in engine.basic_optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 4096
    ]
    return {
        "losses": first + second, "again": again, "after": after, "same": all(torch.equal(after[name], p) for name, p in resumed.items()),
        "dtypes": {str(t.dtype) for t in moments}, "bytes": sum(t.numel() * t.element_size() for t in moments),
        "numbers": sum(t.numel() for t in moments), "class": type(engine.basic_optimizer).__name__,
    }  # fmt: skip


def main() -> None:
    rank, world, port, out, stage = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_COMPILE_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    patches.apply()
    results = {bits: run(f"{out}.model", stage, world, rank, bits, f"{out}.{bits}") for bits in (8, 32)}
    torch.save(results, f"{out}.{rank}")


if __name__ == "__main__":
    main()
