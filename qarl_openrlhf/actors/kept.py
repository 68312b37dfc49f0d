"""``--objective.drop``: how many tokens or responses an optimizer step keeps, over its micro-batches and all ranks.

The mean of the kept ones needs their number before the first backward of the step. Which responses a band takes out depends on
the current policy, so the step's micro-batches get one forward more, without gradient; not before the first update of a rollout,
where the current log-probs are the old ones, and not for objectives that drop by the mismatch to the sampler alone.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist


def optimizer_steps(batches: list, ends: list[bool]) -> Iterator[tuple[int, list]]:
    """(index of its first micro-batch, its micro-batches) of each optimizer step. ``ends[i]``: a step ends after micro-batch i."""
    start = 0
    for index, last in enumerate(ends):
        if last:
            yield start, batches[start : index + 1]
            start = index + 1


@torch.no_grad()
def global_kept(objective, batches: list, current_log_probs, *, group=None, accumulation: int = 1) -> torch.Tensor:
    """What ``Objective.__call__`` takes as ``global_kept``: 0-d float32, divided by ``accumulation`` as OpenRLHF's counts are.

    Args:
        batches: the micro-batches (``Experience``) of one optimizer step on this rank.
        current_log_probs: micro-batch -> log-probs [B, A] of the current policy; called once for each, on every rank.
    """
    total = torch.zeros((), device=batches[0].action_mask.device)
    for batch in batches:
        total += objective.count_kept(
            current_log_probs(batch), batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask
        )
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total / accumulation
