"""A rollout's micro-batches on their way to the device."""

import torch
from openrlhf.trainer.ppo_utils import experience as openrlhf_experience


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
