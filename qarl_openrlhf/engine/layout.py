"""Where each checkpoint tensor lives inside a vLLM model: names, fused rows and the part this tensor-parallel rank holds.

vLLM fuses q/k/v and gate/up into one parameter and splits parameters over ranks; the checkpoint (and the learner) know
neither. The slots below say, for every checkpoint tensor, its full shape and dtype and which rows of which parameter hold
which part of it. They are derived from the layers, not from vLLM's weight loaders, so that reading back through them also
checks the loaders.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


@dataclass(frozen=True)
class Part:
    """A piece of a full tensor: ``size`` entries from ``offset`` along ``dim``; dim None means all of it."""

    dim: int | None = None
    offset: int = 0
    size: int = 0

    def of(self, full: Tensor) -> Tensor:
        return full if self.dim is None else full.narrow(self.dim, self.offset, self.size)


@dataclass(frozen=True)
class Slot:
    """One checkpoint tensor in this rank's model: rows ``start : start + rows`` of ``parameter`` hold ``part`` of it."""

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter  # as a checkpoint has it; on the meta device where the engine keeps it in a kernel's layout
    start: int
    rows: int
    part: Part
    layer: str = ""  # path of the vLLM layer that owns the parameter,
    attribute: str = ""  # and the parameter's name in it

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    def place(self, data: Tensor) -> Tensor:
        """The part of the parameter's ``data`` that holds this rank's part of the tensor, as a view."""
        if self.attribute == "weight_shape":
            return data[self.start] if data.dim() == 2 else data
        return data[self.start : self.start + self.rows]

    def read(self) -> Tensor:
        """This rank's part of the tensor, as a view of the engine's memory."""
        return self.place(self.parameter.data)


class ShardShapeParameter(nn.Parameter):
    """``weight_shape`` of a (fused) int4 layer: int64 [fused projections, 2], one row a projection.

    compressed-tensors stores one ``weight_shape`` a projection; vLLM's own method keeps only the last one loaded, so it
    could not be read back.
    """

    def __new__(cls, projections: int):
        return super().__new__(cls, torch.zeros(projections, 2, dtype=torch.int64), requires_grad=False)

    def __init__(self, projections: int):
        pass

    def load(self, loaded: Tensor, shard_id: int | str = 0) -> None:
        self.data[{"q": 0, "k": 1, "v": 2}.get(shard_id, shard_id)].copy_(loaded)


@dataclass(frozen=True)
class Projection:
    """One projection of a (fused) linear layer on this rank.

    Rows ``start : start + rows`` of the fused weight are output features ``offset : offset + rows`` of ``total``.
    """

    name: str
    start: int
    rows: int
    offset: int
    total: int


def projections(path: str, layer: LinearBase, packed: dict[str, list[str]]) -> list[Projection]:
    """The checkpoint's projections inside a vLLM linear layer, in fused order.

    packed: the model's ``packed_modules_mapping``, e.g. {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    parent, _, last = path.rpartition(".")
    names = [f"{parent}.{name}".lstrip(".") for name in packed.get(last, [last])]
    rank, tp = layer.tp_rank, layer.tp_size
    if isinstance(layer, QKVParallelLinear):
        kv_rank = rank // layer.num_kv_head_replicas  # ranks beyond the number of kv heads hold copies
        pieces = [
            (layer.num_heads * layer.head_size, rank, layer.total_num_heads * layer.head_size),
            (layer.num_kv_heads * layer.head_size, kv_rank, layer.total_num_kv_heads * layer.head_size),
            (layer.num_kv_heads * layer.v_head_size, kv_rank, layer.total_num_kv_heads * layer.v_head_size),
        ]
    elif isinstance(layer, (RowParallelLinear, ReplicatedLinear)):  # all output features on every rank
        pieces = [(layer.output_size, 0, layer.output_size)]
    else:
        pieces = [(rows, rank, rows * tp) for rows in layer.output_partition_sizes]
    if len(pieces) != len(names):
        raise NotImplementedError(f"{path}: {len(pieces)} fused parts, but the checkpoint names are {names}")
    result, start = [], 0
    for name, (rows, index, total) in zip(names, pieces, strict=True):
        result.append(Projection(name, start, rows, index * rows, total))
        start += rows
    return result


def own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    return dict(layer.named_parameters(recurse=False))


def slots(model: nn.Module, parameters: Callable[[nn.Module], dict] = own_parameters) -> dict[str, Slot]:
    """Every checkpoint tensor the model must be given, by name; tied weights once, under the embedding's name.

    parameters: the checkpoint parameters of one layer, by attribute.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    result: dict[str, Slot] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = parameters(module)
        for name, parameter in own.items():
            identity = id(module._parameters.get(name, parameter))
            if identity in seen:
                continue
            seen.add(identity)
            if name.startswith(("w13_", "w2_")):
                slot = gpu_expert_slot(path, module, name, own)
                found = [] if slot is None else [slot]
            else:
                found = _slots_of(path, name, module, parameter, packed)
            for slot in found:
                result[slot.name] = replace(slot, layer=path, attribute=name)
    return result


def gpu_expert_slot(*args) -> Slot | None:
    from qarl_openrlhf.engine.gpu_moe import expert_slot  # it builds on this module

    return expert_slot(*args)


def _slots_of(path: str, name: str, module: nn.Module, parameter: nn.Parameter, packed: dict) -> Iterator[Slot]:
    if isinstance(module, LinearBase):
        for index, p in enumerate(projections(path, module, packed)):
            checkpoint_name = f"{p.name}.{name}"
            if name == "weight_shape":  # one row a projection (ShardShapeParameter), or vLLM's one for all
                yield Slot(checkpoint_name, (2,), parameter, index, 1, Part())
            elif isinstance(module, RowParallelLinear):
                yield _row_parallel(checkpoint_name, module, parameter)
            else:
                part = Part() if p.rows == p.total else Part(0, p.offset, p.rows)
                yield Slot(checkpoint_name, (p.total, *parameter.shape[1:]), parameter, p.start, p.rows, part)
    elif isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices  # rows beyond them are padding of the vocabulary
        rows = indices.num_org_elements
        part = Part(0, indices.org_vocab_start_index, rows)
        yield Slot(f"{path}.{name}", (module.org_vocab_size, *parameter.shape[1:]), parameter, 0, rows, part)
    elif hasattr(module, "qarl_slot"):  # experts on a CPU: engine.moe_method
        yield module.qarl_slot(path, name)
    else:
        yield Slot(f"{path}.{name}", tuple(parameter.shape), parameter, 0, parameter.shape[0], Part())


def _row_parallel(name: str, layer: RowParallelLinear, parameter: nn.Parameter) -> Slot:
    """Split along the input features, if the parameter has any (a bias and per-channel scales are on every rank)."""
    rows, shape, part = parameter.shape[0], tuple(parameter.shape), Part()
    if getattr(parameter, "input_dim", None) is not None and layer.tp_size > 1:
        size = shape[1]
        shape, part = (rows, size * layer.tp_size), Part(1, layer.tp_rank * size, size)
    return Slot(name, shape, parameter, 0, rows, part)
