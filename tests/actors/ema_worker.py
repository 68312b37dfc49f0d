"""The policy's Ray actor as a plain object on each rank: trained, resumed with a moving average, resumed again."""

import json
import os
from pathlib import Path

import torch

from qarl_openrlhf import patches


def main(rank: int, world: int, model: str, directory: str, stage: int) -> None:
    patches.apply()
    from qarl_openrlhf.actors.moving_average import local
    from qarl_openrlhf.actors.policy import QarlPolicyActor
    from qarl_openrlhf.actors.strategy import make_strategy

    from .conftest import learner_args, make_rollout

    def policy(tag: str | None, ema: bool) -> QarlPolicyActor:
        flags = {"ds__zero_stage": stage, "actor__num_gpus_per_node": world, "ref__num_gpus_per_node": world}
        args = learner_args(model, **flags, ckpt__path=directory, ckpt__load_enable=bool(tag), train__enable_ema=ema)
        args.ckpt.load_tag = tag
        actor = QarlPolicyActor(world, rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        actor.init_model_from_pretrained(make_strategy(args), model, 100, None)
        return actor

    def weights(network) -> list[torch.Tensor]:
        return [local(parameter).float().cpu().clone() for parameter in network.parameters()]

    def equal(one: list, other: list) -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]

    first = policy(None, ema=False)
    base = weights(first.actor)
    for item in make_rollout(seed=rank, count=8):
        first.trainer.replay_buffer.append(item)
    first.trainer.ppo_train(0.0)
    first.save_checkpoint("global_step1", {"global_step": 1})

    resumed = policy("global_step1", ema=True)
    trained, start = weights(resumed.actor), weights(resumed.ema_model)
    changed = sum(not same for same in equal(base, trained))  # BF16 norms do not move in one small step
    result = {"trained": 2 * changed > len(base), "starts from the resumed weights": all(equal(start, trained))}
    with torch.no_grad():
        for parameter in resumed.actor.parameters():
            local(parameter).add_(1.0)
    for _ in range(resumed.strategy.accumulated_gradient):
        resumed.strategy.moving_average(resumed.actor, resumed.ema_model, 0.5, "cuda")
    moved = weights(resumed.ema_model)
    result["follows"] = all(torch.allclose(m, s + 0.5, atol=0.02) for m, s in zip(moved, start, strict=True))
    resumed.save_checkpoint("global_step2", {"global_step": 2})
    again = weights(policy("global_step2", ema=True).ema_model)
    result["is kept"] = all(equal(again, moved)) or (rank > 0 and stage != 3)  # there rank 0 has the copy that is saved
    Path(directory, f"rank{rank}.json").write_text(json.dumps(result))

