"""Where pushed expert tensors live inside vLLM's own mixture-of-experts layers on GPUs.

A push has one stacked tensor a projection of a block (:mod:`qarl_openrlhf.quant.expert_names`):

    experts.gate_up_proj[.suffix]  [E, 2 I, ...]   ->  w13_<suffix>   [local E, 2 I / TP, ...]
    experts.down_proj[.suffix]     [E, H, ...]     ->  w2_<suffix>    [local E, H, ... / TP]

Marlin's checkpoint parameters are transposed, [E, K, N]. Under tensor parallelism a rank holds a share of the intermediate
features, under expert parallelism a run of experts.
"""

from dataclasses import dataclass

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
    block = path.removesuffix("routed_experts").removesuffix(".")
    name = f"{block}.{_PROJECTIONS[prefix]}" + (f".{suffix}" if quantized else "")
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
