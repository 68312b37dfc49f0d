"""One rank of a real learner: what the backward of every micro-batch gives the log-probs, over two epochs of two optimizer steps.

Rank 0 writes OUT: {(setting, layout): (metrics, {update: (log_probs, old, rollout, advantages, mask, gradient)} of all ranks, lists of rows)}.
"""

import torch
import torch.distributed as dist

LAYOUTS = {
    "padded": {"train__micro_batch_size": 2},  # four micro-batches a rank and step
    "packed-dynamic": {
        "ds__packing_samples": True,
        "train__dynamic_batch_enable": True,
        "train__max_tokens_per_gpu": 64,
        "rollout__max_tokens_per_gpu": 64,
    },
}
SETTINGS = {  # with what the reference takes beside the name
    "grpo_tis": ({}, {}),
    "dual_clip": ({}, {}),
    "cispo": ({}, {}),
    "sapo": ({}, {}),
    "gspo": ({}, {}),
    "tbpo": ({"objective__is_weight": "token"}, {"kind": "token"}),
    "mis_grpo": ({"objective__is_low": 0.5, "objective__is_high": 1.5}, {"low": 0.5, "high": 1.5}),
}


def rollout() -> list:
    from tests.actors.conftest import make_rollout

    items, noise = make_rollout(count=32), torch.Generator().manual_seed(7)
    for index, item in enumerate(items):
        item.advantages = torch.full_like(item.advantages, (1.3, -0.7, 0.0, -1.1, 0.5)[index % 5])
        item.rollout_log_probs = -6.24 + 0.15 * torch.randn(item.action_mask.shape, generator=noise)  # near that of a model of 512 tokens
    items[4].action_mask[:] = 0
    return items


def main(rank: int, world: int, model: str, out: str) -> None:
    from tests.actors.conftest import build_learner

    results = {}
    for name, (flags, _) in SETTINGS.items():
        for layout, layout_flags in LAYOUTS.items():
            flags = {"objective__name": name, "actor__num_gpus_per_node": world, **flags, **layout_flags}
            learner = build_learner(
                model, quant__scheme="bf16", rollout__batch_size=8, train__batch_size=16, train__max_epochs=2, actor__adam__lr=2e-3, **flags
            )
            for item in rollout()[rank::world]:
                learner.replay_buffer.append(item)
            seen = watch(learner)
            metrics = learner.ppo_train(0.0)
            ranks = [None] * world
            dist.all_gather_object(ranks, seen)
            updates = {u: [row for of_rank in ranks for row in of_rank if row[0] == u] for u in range(4)}
            results[name, layout] = metrics, {u: [row[1:] for row in rows] for u, rows in updates.items()}
    if rank == 0:
        torch.save(results, out)


def watch(learner) -> list[tuple]:
    """Fills itself as the learner trains: (update, log_probs, old, rollout, advantages, mask, gradient) of each micro-batch."""
    seen, train = [], learner.training_step

    def training_step(batch, *args):
        gradients = []

        def watched(log_probs, *inputs, **counts):
            log_probs.register_hook(gradients.append)
            return loss(log_probs, *inputs, **counts)

        loss, update = learner.actor_loss_fn.objective, int(learner.actor.model.global_steps)
        learner.actor_loss_fn.objective = watched
        try:
            status = train(batch, *args)
        finally:
            learner.actor_loss_fn.objective = loss
        row = learner.actor_loss_fn.log_probs, batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask, *gradients
        seen.append((update, *(x.detach().clone() for x in row)))
        return status

    learner.training_step = training_step
    return seen
