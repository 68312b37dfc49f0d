"""One rank of a real learner: live bytes at three moments of a step, by ZeRO stage and ``--quant.cache``.

``main`` writes OUT.RANK: {(stage, mode, optimizer, offloaded): {moment: bytes}}.
"""

import gc

import torch

CASES = [(stage, mode, "adam", False) for stage in (1, 2, 3) for mode in ("dequant", "packed", "none")]
CASES += [(stage, "packed", "muon", offloaded) for stage in (2, 3) for offloaded in (False, True)]
CASES += [(stage, "packed", "adam", True) for stage in (2, 3)]
WINDOW = 8  # responses an optimizer step, over all ranks


def flags(stage: int, mode: str, optimizer: str, offloaded: bool, world: int) -> dict:
    wanted = {"ds__zero_stage": stage, "quant__cache": mode, "actor__num_gpus_per_node": world, "actor__optim": optimizer}
    wanted["ds__adam_offload"] = offloaded
    return wanted | {"actor__muon__lr": 1e-3, "train__micro_batch_size": 1, "train__batch_size": WINDOW}


def storages() -> dict[int, int]:
    """Address -> bytes of every storage that a live tensor (or its gradient) has."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type == "cpu":
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def live(before: dict) -> int:
    return sum(size for address, size in storages().items() if address not in before)


def watch(strategy, world: int, before: dict) -> dict[str, int]:
    """To be filled in: while gradients accumulate, and just before an optimizer step (the second: the first makes the state)."""
    at, calls, step, window = {}, [], strategy.optimizer_step, WINDOW // world

    def watched(*args, **kwargs):
        calls.append(None)
        if len(calls) == window + 1:
            at["accumulating"] = live(before)
        if len(calls) == 2 * window:
            at["step"] = live(before)
        return step(*args, **kwargs)

    strategy.optimizer_step = watched
    return at


def measure(learner, items, world: int, before: dict) -> dict[str, int]:
    """The two moments of a step, and after a publish."""
    for item in items:
        learner.replay_buffer.append(item)
    at = watch(learner.strategy, world, before)
    learner.ppo_train(0.0)
    learner.replay_buffer.clear()
    for published in learner.publishing.tensors():
        del published
    at["published"] = live(before)
    return at


def critic_flags(stage: int, optimizer: str, offloaded: bool, world: int) -> dict:
    wanted = flags(stage, "none", "adam", offloaded, world)  # the policy's own optimizer must not count
    return wanted | {
        "critic__optim": optimizer, "critic__num_gpus_per_node": world, "critic__muon__lr": 1e-3, "critic__adam__lr": 1e-3,
        "quant__scheme": "bf16", "algo__advantage__estimator": "gae",
    }  # fmt: skip


CRITICS = [(1, "adam", False), (2, "adam", False), (3, "adam", False), (2, "muon", False), (3, "muon", True)]


def critics(rank: int, world: int, model: str, out: str) -> None:
    from tests.actors.conftest import build_critic, learner_args, make_rollout

    items = make_rollout(count=2 * WINDOW // world)
    for item in items:
        item.values, item.returns = torch.zeros_like(item.advantages), item.advantages
    results = {}
    for case in CRITICS:
        before = storages()
        actor = build_critic(learner_args(model, **critic_flags(*case, world)))
        for item in items:
            actor.append(item)
        results[case] = watch(actor.strategy, world, before)
        actor.fit()
    torch.save(results, f"{out}.{rank}")


def main(rank: int, world: int, model: str, out: str) -> None:
    from tests.actors.conftest import build_learner, make_rollout

    items = make_rollout(count=2 * WINDOW // world)
    results = {}
    for case in CASES:
        before = storages()
        results[case] = measure(build_learner(model, **flags(*case, world)), items, world, before)
    torch.save(results, f"{out}.{rank}")

