"""Where pushed expert tensors live inside vLLM's own mixture-of-experts layers on GPUs.

A push has one stacked tensor a projection of a block (:mod:`qarl_openrlhf.quant.expert_names`):

    experts.gate_up_proj[.suffix]  [E, 2 I, ...]   ->  w13_<suffix>   [local E, 2 I / TP, ...]
    experts.down_proj[.suffix]     [E, H, ...]     ->  w2_<suffix>    [local E, H, ... / TP]

Marlin's checkpoint parameters are transposed, [E, K, N]. Under tensor parallelism a rank holds a share of the intermediate
features, under expert parallelism a run of experts. :func:`effective_weights` reads back what a kernel multiplies by.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qarl_openrlhf.engine.layout import Part, Slot
from qarl_openrlhf.patches import vllm_experts

_PROJECTIONS = {"w13_": "gate_up_proj", "w2_": "down_proj"}
_SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_shape")


@dataclass(frozen=True)
class ExpertPart(Part):
    """A rank's share of a stacked tensor: experts ``first : first + count``, and of those the part along ``dim``.

    halves: the rows are the gate's, then the up projection's; the share is one of each, as a view [E, 2, size, ...].
    """

    first: int = 0
    count: int = 0
    halves: bool = False

    def of(self, full: Tensor) -> Tensor:
        local = full.narrow(0, self.first, self.count)
        if self.halves:
            return local.unflatten(1, (2, -1)).narrow(2, self.offset, self.size)
        return local if self.dim is None else local.narrow(self.dim, self.offset, self.size)


@dataclass(frozen=True)
class ExpertSlot(Slot):
    """A stacked tensor's place in a (possibly transposed) parameter of vLLM."""

    transposed: bool = False

    def place(self, data: Tensor) -> Tensor:
        if self.attribute.endswith("weight_shape"):
            return data
        view = data.transpose(1, 2) if self.transposed else data
        return view.unflatten(1, (2, -1)) if self.part.halves else view


def expert_slot(path: str, layer: nn.Module, attribute: str, parameter: Tensor, quantized: bool) -> Slot | None:
    """The slot of one parameter of an expert layer; None for those that no checkpoint has (sort indices and the like)."""
    prefix = next((p for p in _PROJECTIONS if attribute.startswith(p)), "")
    suffix = attribute.removeprefix(prefix)
    if not prefix or suffix not in _SUFFIXES:
        return None
    name = _name(path, prefix) + (f".{suffix}" if quantized else "")
    if suffix == "weight_shape":
        return ExpertSlot(name, (2,), parameter, 0, parameter.shape[0], Part())
    if suffix == "weight_packed":
        vllm_experts.apply()
    config = layer.moe_config
    tp, rank = config.tp_size, config.tp_rank
    first, count = _local_experts(path, layer)
    transposed = bool(getattr(parameter, "is_transposed", False))
    experts, *rest = parameter.shape
    shape = list(reversed(rest)) if transposed else rest
    if prefix == "w13_":
        size = shape[0] // 2
        part = ExpertPart(1, rank * size, size, first, count, halves=True)
        shape[0] *= tp
    elif tp == 1 or (suffix == "weight_scale" and not transposed and shape[1] == 1):  # a scale a channel is on every rank
        part = ExpertPart(None, 0, 0, first, count)
    else:
        part = ExpertPart(2, rank * shape[1], shape[1], first, count)
        shape[1] *= tp
    return ExpertSlot(name, (config.num_experts, *shape), parameter, 0, experts, part, transposed=transposed)


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
    tp, rank = config.tp_size, config.tp_rank
    halves = ExpertPart(1, rank * inner, inner, first, count, halves=True)
    columns = ExpertPart(2, rank * inner, inner, first, count)
    return {
        _name(path, "w13_"): ((config.num_experts, 2 * inner * tp, hidden), halves, gate_up.unflatten(1, (2, -1)).cpu()),
        _name(path, "w2_"): ((config.num_experts, hidden, inner * tp), columns, down.cpu()),
    }


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
