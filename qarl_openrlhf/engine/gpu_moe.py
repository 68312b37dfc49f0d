"""Where pushed expert tensors live inside vLLM's own mixture-of-experts layers on GPUs.

A push has one stacked tensor a projection of a block (:mod:`qarl_openrlhf.quant.expert_names`):

    experts.gate_up_proj[.suffix]  [E, 2 I, ...]   ->  w13_<suffix>   [local E, 2 I / TP, ...]
    experts.down_proj[.suffix]     [E, H, ...]     ->  w2_<suffix>    [local E, H, ... / TP]

Marlin's checkpoint parameters are transposed, [E, K, N]. Under tensor parallelism a rank holds a share of the intermediate
features, under expert parallelism a run of experts. :func:`effective_weights` reads back what a kernel multiplies by.
"""

import torch
from torch import Tensor, nn

from qarl_openrlhf.engine.layout import Part, Slot
from qarl_openrlhf.engine.moe_layout import ExpertSlot, share
from qarl_openrlhf.patches import vllm_experts

_PROJECTIONS = {"w13_": "gate_up_proj", "w2_": "down_proj"}
_SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_shape")


def expert_slot(path: str, layer: nn.Module, attribute: str, own: dict[str, Tensor]) -> Slot | None:
    """The slot of one of an expert layer's ``own`` checkpoint parameters; None for those that no checkpoint has (sort indices and the like)."""
    prefix = next((p for p in _PROJECTIONS if attribute.startswith(p)), "")
    suffix = attribute.removeprefix(prefix)
    if not prefix or suffix not in _SUFFIXES:
        return None
    parameter = own[attribute]
    name = _name(path, prefix) + (f".{suffix}" if "w13_weight_scale" in own else "")
    if suffix == "weight_shape":
        return ExpertSlot(name, (2,), parameter, 0, parameter.shape[0], Part())
    if suffix == "weight_packed":
        vllm_experts.apply()
    transposed = bool(getattr(parameter, "is_transposed", False))
    experts, *shape = parameter.shape
    a_channel = suffix == "weight_scale" and f"{prefix}weight_packed" not in own
    part, whole = share(
        _PROJECTIONS[prefix], shape[::-1] if transposed else shape, layer.moe_config, _local_experts(path, layer), scale_a_channel=a_channel
    )
    return ExpertSlot(name, (layer.moe_config.num_experts, *whole), parameter, 0, experts, part, transposed=transposed)


@torch.no_grad()
def effective_weights(path: str, layer: nn.Module) -> dict[str, tuple[tuple[int, ...], Part, Tensor]]:
    """Projection name -> (full shape [E, N, K], part, this rank's part of it in the model's dtype), of 4-bit experts.

    What the kernel multiplies by, bit for bit: an identity matrix goes through the layer, expert by expert, and in the place of
    the activation function a function that keeps the first product's output (gate and up) and gives the second an identity
    matrix (down). Empty for experts that no weight-only kernel multiplies.
    """
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExpertsBase

    method, config = layer.quant_method, layer.moe_config
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if not isinstance(experts, MarlinExpertsBase):
        return {}
    first, count = _local_experts(path, layer)
    hidden, inner = config.hidden_dim, layer.intermediate_size_per_partition
    device, dtype = layer.w13_weight_scale.device, layer.w13_weight_scale.dtype
    # NaN: what is not read must equal nothing, least of all what an earlier call left in this memory.
    gate_up = torch.full((count, 2 * inner, hidden), torch.nan, dtype=dtype, device=device)
    down = torch.full((count, hidden, inner), torch.nan, dtype=dtype, device=device)
    rows = 128  # no more tokens than the engine's own workspaces, which are locked once graphs are captured
    for local in range(count):
        for start in range(0, max(hidden, inner), rows):
            unit = torch.zeros(rows, max(hidden, inner) + rows, dtype=dtype, device=device)
            unit.diagonal(start).fill_(1)  # row i is unit vector start + i

            def instead(activation, output: Tensor, product: Tensor, **_) -> None:
                mine = gate_up[local, :, start : start + rows]
                mine.copy_(product[: mine.shape[1]].t())
                output.copy_(unit[:, :inner])

            one = torch.ones(rows, 1, device=device)
            chosen = torch.full((rows, 1), first + local, dtype=torch.int32, device=device)
            experts.activation = instead
            try:
                product = method.apply(layer, unit[:, :hidden].contiguous(), one, chosen, None, None)
            finally:
                del experts.activation
            mine = down[local, :, start : start + rows]
            mine.copy_(product[: mine.shape[1]].t())
    found = {}
    for prefix, weight in (("w13_", gate_up), ("w2_", down)):
        part, whole = share(_PROJECTIONS[prefix], weight.shape[1:], config, (first, count))
        found[_name(path, prefix)] = ((config.num_experts, *whole), part, part.seen(weight).cpu())
    return found


def _name(path: str, prefix: str) -> str:
    """("...mlp.experts.routed_experts", "w2_") -> "...mlp.experts.down_proj"."""
    return f"{path.removesuffix('routed_experts').removesuffix('.')}.{_PROJECTIONS[prefix]}"


def _local_experts(path: str, layer: nn.Module) -> tuple[int, int]:
    """(first, count) of the experts that this rank holds."""
    count = layer.local_num_experts
    mapping = getattr(layer, "_expert_map", None)
    if mapping is None:
        return 0, count
    held = (mapping >= 0).nonzero()[:, 0].tolist()
    if held != list(range(held[0], held[0] + count)):
        raise NotImplementedError(f"{path}: this rank's experts are not a run ({held[:4]} ...); use linear expert placement")
    return held[0], count
