"""Where pushed expert tensors live inside a vLLM mixture-of-experts layer that runs :class:`CpuMoEMethod`.

One stacked tensor is one parameter. Under tensor parallelism a rank holds a share of the intermediate features: of the gate's
rows and of the up projection's rows in ``gate_up_proj``, of the columns in ``down_proj``.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from qarl_openrlhf.engine.layout import Part, Slot
from qarl_openrlhf.quant.names import PROJECTIONS


@dataclass(frozen=True)
class GateUpPart(Part):
    """Rows ``offset : offset + size`` of the gate and of the up projection, as a view [E, 2, size, ...] of [E, 2 I, ...]."""

    def of(self, full: Tensor) -> Tensor:
        return full.unflatten(1, (2, -1)).narrow(2, self.offset, self.size)


@dataclass(frozen=True)
class GateUpSlot(Slot):
    """A rank's share of a stacked gate_up tensor; reads as [E, 2, rows of one projection, ...]."""

    def read(self) -> Tensor:
        return self.parameter.data.unflatten(1, (2, -1))


@dataclass(frozen=True)
class WholeSlot(Slot):
    """A parameter that is one tensor, or a share of its columns."""

    def read(self) -> Tensor:
        return self.parameter.data


def checkpoint_name(path: str, attribute: str) -> str:
    """("...mlp.experts.routed_experts", "down_proj_weight_scale") -> "...mlp.experts.down_proj.weight_scale"."""
    block = path.removesuffix("routed_experts").removesuffix(".")
    projection = next(p for p in PROJECTIONS if attribute.startswith(p))
    return ".".join(part for part in (block, projection, attribute[len(projection) + 1 :]) if part)


def rank_part(layer: nn.Module, projection: str, shape: tuple[int, ...]) -> Part:
    """The share of a stacked tensor that this rank holds; ``shape`` [E, N, K] is the rank's."""
    tp, rank = layer.moe_config.tp_size, layer.moe_config.tp_rank
    if tp == 1:
        return Part()
    if projection == "gate_up_proj":
        return GateUpPart(1, rank * (shape[1] // 2), shape[1] // 2)
    return Part(2, rank * shape[2], shape[2])


def expert_slot(layer: nn.Module, path: str, attribute: str) -> Slot:
    """The slot of one parameter of a layer that lies at ``path`` in its model."""
    parameter = layer._parameters[attribute]
    name, shape, tp = checkpoint_name(path, attribute), tuple(parameter.shape), layer.moe_config.tp_size
    projection = next(p for p in PROJECTIONS if attribute.startswith(p))
    # A scale a channel is on every rank; group scales are split, though a rank may hold only one a row.
    a_scale_a_channel = attribute == "down_proj_weight_scale" and "down_proj_weight_packed" not in layer._parameters
    part = Part() if attribute.endswith("weight_shape") or a_scale_a_channel else rank_part(layer, projection, shape)
    if isinstance(part, GateUpPart):
        return GateUpSlot(name, (shape[0], shape[1] * tp, *shape[2:]), parameter, 0, shape[0], part)
    if part.dim is not None:
        shape = (*shape[:2], shape[2] * tp)
    return WholeSlot(name, shape, parameter, 0, parameter.shape[0], part)
