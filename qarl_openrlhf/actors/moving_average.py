"""The moving average of the policy's weights (``--train.enable_ema``).

It is kept in float32. In BF16 it would stand still: (1 - beta) times a change of a weight's last bit is less than half of that bit,
and is rounded away in every step. Each process keeps a part: its shards under ZeRO-3, else an equal share of every parameter; where
the BF16 model lies that :func:`write` makes of it, which is in main memory under ZeRO-3.
"""

import torch
import torch.distributed as dist

KEPT = "float32_parts"  # attribute of the BF16 model, for whoever has only that one


def local(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this process holds of a parameter: its shard under ZeRO-3, else all of it."""
    return getattr(parameter, "ds_tensor", parameter).data


def shares(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
    """A whole parameter cut up, flat, one share a process; the last processes may have none of a small one."""
    flat = parameter.data.view(-1)
    return flat.split(max(1, -(-flat.numel() // dist.get_world_size())))


def part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this process averages of a parameter, a view."""
    if hasattr(parameter, "ds_tensor"):
        return local(parameter)
    cut, rank = shares(parameter), dist.get_rank()
    return cut[rank] if rank < len(cut) else parameter.data.view(-1)[:0]


def parts(average: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The average itself: {name of the parameter: float32}; begins as the BF16 model that is given."""
    if not hasattr(average, KEPT):
        kept = {name: part(parameter).to(torch.float32, copy=True) for name, parameter in average.named_parameters()}
        setattr(average, KEPT, kept)
    return getattr(average, KEPT)


@torch.no_grad()
def blend(average: torch.nn.Module, model: torch.nn.Module, beta: float) -> None:
    """average <- beta average + (1 - beta) model, for what is trained; beta 0 copies. Both in the same order and sharding."""
    for kept, parameter in zip(parts(average).values(), model.parameters(), strict=True):
        if parameter.requires_grad:
            kept.lerp_(part(parameter).to(kept.device, torch.float32), 1 - beta)


@torch.no_grad()
def write(average: torch.nn.Module) -> None:
    """Round the average into its BF16 model, before that is saved. All processes call it; all of them get all of it."""
    kept = parts(average)
    for name, parameter in average.named_parameters():
        part(parameter).copy_(kept[name])
        if not hasattr(parameter, "ds_tensor"):
            for rank, share in enumerate(shares(parameter)):
                dist.broadcast(share, src=rank)


@torch.no_grad()
def resume(average: torch.nn.Module, model: torch.nn.Module, saved: dict) -> None:
    """Go on from what a checkpoint has. All processes call it.

    saved: this process's, with ``ema_float32`` (its :func:`parts`), with the BF16 weights ``ema`` of an older version, or with
    neither, if the run before had no average: then it begins here, at the resumed ``model``, not at the base model.
    """
    exact, rounded = saved.pop("ema_float32", None), saved.pop("ema", None)  # popped: it would stay in memory for the whole run
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (bool(exact), bool(rounded)))
    if any(has_exact for has_exact, _ in found):
        for name, kept in parts(average).items():
            kept.copy_(exact[name])
    elif any(has_rounded for _, has_rounded in found):
        for name, parameter in average.named_parameters():
            if name in (rounded or {}):
                local(parameter).copy_(rounded[name])
            if not hasattr(parameter, "ds_tensor"):  # rank 0 alone had saved them
                dist.broadcast(parameter.data, src=0)
    else:
        blend(average, model, beta=0.0)
