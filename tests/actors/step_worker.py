"""One rank of a real learner: the gradient norm and weights of one optimizer step of 16 responses, in several settings.

Rank 0 writes OUT: {setting: (norm, {name: movement of a weight})}.
"""

import torch

BUDGET = {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 64, "rollout__max_tokens_per_gpu": 64}
SETTINGS = {
    "tbpo": {},
    "tbpo-zero3": {"ds__zero_stage": 3},
    "tbpo-dynamic": BUDGET,
    "tbpo-dynamic-zero1": BUDGET | {"ds__zero_stage": 1},
    "grpo_tis": {"objective__name": "grpo_tis"},
    "grpo_tis-dynamic-zero3": BUDGET | {"objective__name": "grpo_tis", "ds__zero_stage": 3},
    "gspo": {"objective__name": "gspo"},
    "openrlhf": {"objective__name": None},
}


def weights(learner) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = dict(learner.actor.network.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=learner.args.ds.zero_stage == 3):
        return {name: p.detach().float().clone() for name, p in parameters.items()}


def main(rank: int, world: int, model: str, out: str) -> None:
    from tests.actors.conftest import build_learner, make_rollout

    results = {}
    for name, flags in SETTINGS.items():
        learner = build_learner(
            model, quant__scheme="bf16", train__batch_size=16, train__micro_batch_size=2, actor__num_gpus_per_node=world, **flags
        )
        before = weights(learner)
        for item in make_rollout()[rank::world]:  # responses of other lengths on every rank
            learner.replay_buffer.append(item)
        learner.ppo_train(0.0)
        after = weights(learner)
        results[name] = float(learner.actor.model.get_global_grad_norm()), {n: after[n] - before[n] for n in before}
    if rank == 0:
        torch.save(results, out)

