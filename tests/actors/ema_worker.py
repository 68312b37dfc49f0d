"""The policy's Ray actor as a plain object on each rank: trained, resumed with a moving average, resumed again."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import torch

from qarl_openrlhf import patches

BETA = 0.992
STEPS = 40


def as_older_versions_saved(model, rank: int) -> dict:
    """This rank's shards under ZeRO-3, else all weights on rank 0."""
    if any(hasattr(p, "ds_tensor") for p in model.parameters()):
        return {name: p.ds_tensor.detach().cpu().clone() for name, p in model.named_parameters()}
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()} if rank == 0 else {}


@contextmanager
def copies_to_main_memory():
    """What is asked for its copy in main memory meanwhile: all of a GPU's average at once is four bytes a weight."""
    asked, cpu = [], torch.Tensor.cpu
    torch.Tensor.cpu = lambda tensor, *args, **kwargs: (asked.append(tensor), cpu(tensor, *args, **kwargs))[1]
    try:
        yield asked
    finally:
        torch.Tensor.cpu = cpu


def main(rank: int, world: int, model: str, directory: str, stage: int) -> None:
    patches.apply()
    from qarl_openrlhf.actors.moving_average import local, part, parts, write
    from qarl_openrlhf.actors.policy import QarlPolicyActor
    from qarl_openrlhf.actors.strategy import make_strategy

    from .conftest import learner_args, make_rollout

    def policy(tag: str | None, ema: bool) -> QarlPolicyActor:
        flags = {"ds__zero_stage": stage, "actor__num_gpus_per_node": world, "ref__num_gpus_per_node": world}
        args = learner_args(model, **flags, ckpt__path=directory, ckpt__load_enable=bool(tag), train__enable_ema=ema)
        args.ckpt.load_tag, args.ckpt.output_dir = tag, f"{directory}/saved"
        actor = QarlPolicyActor(world, rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        actor.init_model_from_pretrained(make_strategy(args), model, 100, None)
        return actor

    def weights(network) -> list[torch.Tensor]:
        return [local(parameter).float().cpu().clone() for parameter in network.parameters()]

    def averages(actor: QarlPolicyActor) -> list[torch.Tensor]:
        return [kept.clone() for kept in parts(actor.ema_model).values()]

    def equal(one: list, other: list) -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]

    def step(actor: QarlPolicyActor, by: int) -> None:
        """Every weight of the policy away from 0 by ``by`` units in its last place, as after ``by`` small optimizer steps."""
        for bits, parameter in zip(start_bits, actor.actor.parameters(), strict=True):
            local(parameter).view(torch.int16).copy_(bits + by)
        for _ in range(actor.strategy.accumulated_gradient):
            actor.strategy.moving_average(actor.actor, actor.ema_model, BETA, "cuda")

    first = policy(None, ema=False)
    base = weights(first.actor)
    for item in make_rollout(seed=rank, count=8):
        first.trainer.replay_buffer.append(item)
    first.trainer.ppo_train(0.0)
    first.save_checkpoint("global_step1", {"global_step": 1})

    resumed = policy("global_step1", ema=True)
    write(resumed.ema_model)
    trained, start = weights(resumed.actor), weights(resumed.ema_model)
    changed = sum(not same for same in equal(base, trained))  # BF16 norms do not move in one small step
    result = {"trained": 2 * changed > len(base), "starts from the resumed weights": all(equal(start, trained))}

    start_bits = [local(parameter).view(torch.int16).clone() for parameter in resumed.actor.parameters()]
    exact = [part(parameter).double().clone() for parameter in resumed.actor.parameters()]
    for i in range(1, STEPS + 1):
        step(resumed, i)
        exact = [BETA * e + (1 - BETA) * part(p).double() for e, p in zip(exact, resumed.actor.parameters(), strict=True)]
        if i == STEPS // 2:
            with copies_to_main_memory() as copied:
                resumed.save_checkpoint("global_step2", {"global_step": 2})
            result["is not copied"] = not any(tensor is average for tensor in copied for average in parts(resumed.ema_model).values())
            kept = averages(resumed)
    moved = averages(resumed)
    result["follows"] = all(torch.allclose(m.double(), e, rtol=1e-5, atol=0) for m, e in zip(moved, exact, strict=True))
    resumed.save_model()
    rounded, unmoved = weights(resumed.ema_model), zip(weights(resumed.ema_model), start, strict=True)
    result["moves the BF16 model"] = not any((now == before).any() for now, before in unmoved)
    own = [part(parameter) for parameter in resumed.ema_model.parameters()]
    result["is rounded once"] = all(equal([m.bfloat16() for m in moved], own))
    if rank == 0:
        torch.save(rounded, Path(directory, "rounded.pt"))

    again = policy("global_step2", ema=True)
    result["is kept"] = all(equal(averages(again), kept))
    for i in range(STEPS // 2 + 1, STEPS + 1):
        step(again, i)
    result["goes on bit for bit"] = all(equal(averages(again), moved))

    # As an older version saved it: in BF16, and without ZeRO-3 on rank 0 alone.
    old = {"version": 1, "first_codes": None, "ema": as_older_versions_saved(resumed.ema_model, rank)}
    resumed.strategy.rank_state = old
    resumed.strategy.save_ckpt(resumed.actor.model, f"{directory}/_actor", "global_step3", client_state={"global_step": 3})
    older = policy("global_step3", ema=True)
    result["starts from an older version's"] = all(equal(averages(older), [o.float() for o in own]))
    write(older.ema_model)
    result["and all of it"] = all(equal(weights(older.ema_model), rounded))
    Path(directory, f"rank{rank}.json").write_text(json.dumps(result))
