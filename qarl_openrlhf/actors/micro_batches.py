"""A rollout's micro-batches: as many as optimizer steps take, and on their way to the device."""

import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils import experience as openrlhf_experience


def keep_whole_steps(buffer, strategy, role: str) -> None:
    """Leave as many responses in a replay buffer as whole optimizer steps take, the same number on every rank; all ranks call this.

    The gradient of a trailing part of a step would leak into the next rollout, and a rank with a step more than the others would wait for
    them for ever. What is dropped is drawn at random, and told. buffer: ``NaiveReplayBuffer`` of padded micro-batches; role: "policy" or
    "critic", for the message.
    """
    each = buffer.sample_batch_size * strategy.accumulated_gradient
    steps = torch.tensor(len(buffer.items) // each, device=torch.cuda.current_device())
    dist.all_reduce(steps, op=dist.ReduceOp.MIN, group=strategy.ds_device_mesh["dp"].get_group())
    over = len(buffer.items) - int(steps) * each
    if not over:
        return
    strategy.print(
        f"{role}: dropping {over} of {len(buffer.items)} responses a process, which do not fill an optimizer step ({each} a process); make "
        "rollout.batch_size * rollout.n_samples_per_prompt a multiple of train.batch_size"
    )
    kept = torch.randperm(len(buffer.items))[over:].sort().values
    buffer.items[:] = [buffer.items[i] for i in kept.tolist()]


def to_device(batch, device: torch.device):
    """Move an ``Experience``'s per-token tensors to ``device``, without waiting for it; returns ``batch``.

    Per-response values (rewards, lengths, ``info``), which only end up in metrics, stay in main memory, the lists of 0-d tensors
    among them as one tensor [B] each. OpenRLHF's own ``to_device`` moves every element of such a list by itself: thousands of
    transfers a step, and as many back when the metrics are made.
    """
    kinds = openrlhf_experience.Experience
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor) and kinds.is_step_tensor_field(name):
            setattr(batch, name, value.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device))
    batch.info = {name: _stacked(value) for name, value in batch.info.items()}
    return batch


def _stacked(value):
    if isinstance(value, list) and value and all(isinstance(x, torch.Tensor) and x.dim() == 0 for x in value):
        return torch.stack(value)
    return value
