"""A rank's share of a stacked expert tensor, and where it lies inside a vLLM layer that runs :class:`CpuMoEMethod` (vLLM's own on
GPUs: :mod:`qarl_openrlhf.engine.gpu_moe`).

One stacked tensor is one parameter. Under tensor parallelism a rank holds a share of the intermediate features: of the gate's
rows and of the up projection's rows in ``gate_up_proj``, of the columns in ``down_proj``; under expert parallelism a run of experts.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from qarl_openrlhf.engine.layout import Part, Slot
from qarl_openrlhf.quant.names import PROJECTIONS


@dataclass(frozen=True)
class ExpertPart(Part):
    """A rank's share of a stacked tensor [E, N, ...]: experts ``first : first + count``, and of those ``size`` entries along ``dim``.

    halves: the rows are the gate's, then the up projection's, of which the share has the same; it is seen as [E, 2, N / 2, ...].
    """

    first: int = 0
    count: int = 0
    halves: bool = False

    def seen(self, experts: Tensor) -> Tensor:
        return experts.unflatten(1, (2, -1)) if self.halves else experts

    def of(self, full: Tensor) -> Tensor:
        local = self.seen(full.narrow(0, self.first, self.count))
        return local if self.dim is None else local.narrow(self.dim, self.offset, self.size)


@dataclass(frozen=True)
class ExpertSlot(Slot):
    """A stacked tensor's place in a parameter that holds nothing else, transposed where vLLM keeps [E, K, N]."""

    transposed: bool = False

    def place(self, data: Tensor) -> Tensor:
        if not isinstance(self.part, ExpertPart):  # weight_shape
            return data
        return self.part.seen(data.transpose(1, 2) if self.transposed else data)


def share(projection: str, shape: tuple[int, int], config, held: tuple[int, int], *, scale_a_channel: bool = False) -> tuple[ExpertPart, tuple]:
    """(part of the stacked tensor that a rank holds, the [N, K] of its matrices whole).

    Args:
        shape: [N, K] of the rank's matrices. config: vLLM's ``moe_config``. held: (first, count) of the rank's experts.
        scale_a_channel: of scales that span a row, which every rank has whole; a group's are split, though a rank may hold one a row.
    """
    (n, k), tp, rank = shape, config.tp_size, config.tp_rank
    if projection == "gate_up_proj":
        return ExpertPart(2, rank * (n // 2), n // 2, *held, halves=True), (n * tp, k)
    if scale_a_channel:
        return ExpertPart(None, 0, 0, *held), (n, k)
    return ExpertPart(2, rank * k, k, *held), (n, k * tp)


def checkpoint_name(path: str, attribute: str) -> str:
    """("...mlp.experts.routed_experts", "down_proj_weight_scale") -> "...mlp.experts.down_proj.weight_scale"."""
    block = path.removesuffix("routed_experts").removesuffix(".")
    projection = next(p for p in PROJECTIONS if attribute.startswith(p))
    return ".".join(part for part in (block, projection, attribute[len(projection) + 1 :]) if part)


def expert_slot(layer: nn.Module, path: str, attribute: str) -> Slot:
    """The slot of one parameter of a layer that lies at ``path`` in its model."""
    parameter, name = layer._parameters[attribute], checkpoint_name(path, attribute)
    experts, *shape = parameter.shape
    if attribute.endswith("weight_shape"):
        return ExpertSlot(name, (2,), parameter, 0, 2, Part())
    projection = next(p for p in PROJECTIONS if attribute.startswith(p))
    a_channel = attribute.endswith("weight_scale") and f"{projection}_weight_packed" not in layer._parameters
    part, whole = share(projection, shape, layer.moe_config, (0, experts), scale_a_channel=a_channel)
    return ExpertSlot(name, (experts, *whole), parameter, 0, experts, part)
