"""A learner whose optimizer leaves the GPU while the engine samples (``--ds.enable_sleep``), whatever the optimizer is.

DeepSpeed's ZeRO-3 refuses to move the states of any optimizer but its own FusedAdam, its ZeRO-1/2 bring back on the GPU what was
never there (a step count, which AdamW then refuses). Of Muon and the 8-bit AdamW the states are moved here; gradients, master
weights and buckets are moved by DeepSpeed, as OpenRLHF asks it to.
"""

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from openrlhf.utils.deepspeed import deepspeed_utils
from torch import Tensor

HELD = "_qarl_states_asleep"  # attribute of DeepSpeed's ZeRO optimizer: [(state tensor, its pinned copy)]


@torch.no_grad()
def offload(engine) -> None:
    """Move the optimizer's states, the FP32 master weights and the gradients of a DeepSpeed engine to main memory."""
    zero = engine.optimizer
    if _is_deepspeeds(engine):
        deepspeed_utils.offload_deepspeed_states(engine)
        return
    if hasattr(zero, HELD):
        return
    kinds = OffloadStateTypeEnum
    moved = [kinds.contiguous_grad_buffer, kinds.lp_grads]
    masters = getattr(zero, "fp32_partitioned_groups_flat", None)  # ZeRO-3
    if masters is None:
        moved.append(kinds.hp_params)
    elif not hasattr(zero, "lp_grad_partitions_flat_pin_buffers"):  # DeepSpeed would allocate it twice, once not pinned
        zero.lp_grad_partitions_flat_pin_buffers = _pinned(zero.grad_partitions_flat_buffer)
    zero.offload_states(include=moved, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
    if masters is not None:  # as DeepSpeed does for FusedAdam; its reload_states brings them back
        if not hasattr(zero, "hp_params_pin_buffers"):
            zero.hp_params_pin_buffers = [_pinned(master) for master in masters]
        for master, copy in zip(masters, zero.hp_params_pin_buffers, strict=True):
            _move(master, copy)
        zero.offloaded_states.add(kinds.hp_params)
    held = [(tensor, _pinned(tensor)) for tensor in _states(zero.optimizer)]
    for tensor, copy in held:
        _move(tensor, copy)
    setattr(zero, HELD, held)
    if masters is not None:
        engine.empty_partition_cache()
    get_accelerator().empty_cache()
    torch.distributed.barrier()
    get_accelerator().synchronize()


@torch.no_grad()
def reload(engine) -> None:
    """Bring back what :func:`offload` moved."""
    zero = engine.optimizer
    if _is_deepspeeds(engine):
        deepspeed_utils.reload_deepspeed_states(engine)
        return
    if not hasattr(zero, HELD):
        return
    zero.reload_states(non_blocking=True)
    device = get_accelerator().current_device_name()
    held = getattr(zero, HELD)
    for tensor, copy in held:
        tensor.data = copy.to(device, non_blocking=True)
    get_accelerator().synchronize()  # the copies are let go only now
    delattr(zero, HELD)


def _is_deepspeeds(engine) -> bool:
    """Whether OpenRLHF's way does: DeepSpeed's own optimizer, or one that is in main memory for good (``--ds.adam_offload``)."""
    in_main_memory = engine.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    return in_main_memory or type(engine.optimizer.optimizer) is FusedAdam


def _states(optimizer) -> list[Tensor]:
    """State tensors on the accelerator, each once."""
    home = get_accelerator().device_name()
    found = {}
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value) and value.device.type == home and value.dim():
                found[id(value)] = value
    return list(found.values())


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def _move(tensor: Tensor, copy: Tensor) -> None:
    copy.copy_(tensor, non_blocking=True)
    tensor.data = copy
