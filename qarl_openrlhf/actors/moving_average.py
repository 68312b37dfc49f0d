"""The moving average of the policy's weights (``--train.enable_ema``), on what each process holds of them."""

import torch


def local(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this process holds of a parameter: its shard under ZeRO-3, else all of it."""
    return getattr(parameter, "ds_tensor", parameter).data


@torch.no_grad()
def blend(average: torch.nn.Module, model: torch.nn.Module, beta: float) -> None:
    """average <- beta average + (1 - beta) model, for what is trained; beta 0 copies. Both in the same order and sharding.

    Computed where the model is, in its dtype; the average may be in main memory.
    """
    for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
        if parameter.requires_grad:
            now = local(parameter)
            local(kept).copy_((1 - beta) * now + beta * local(kept).to(now.device) if beta else now)
