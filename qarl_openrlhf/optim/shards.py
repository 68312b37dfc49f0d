"""Where whole matrices lie in the flat float32 partitions that DeepSpeed's ZeRO hands to an optimizer.

ZeRO-1/2 lay a group's parameters one after the other and cut the whole into equal partitions, so that a partition starts and
ends anywhere in a parameter. ZeRO-3 cuts every parameter into equal parts and lays a rank's parts one after the other.
"""

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Stack:
    """``count`` matrices [rows, columns] of one parameter.

    ranges: for each rank the elements (first, end) of this stack that it holds; offset: where this rank's begin in its flat
    partition.
    """

    name: str
    count: int
    rows: int
    columns: int
    ranges: tuple[tuple[int, int], ...]
    offset: int

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def cost(self) -> int:
        """Multiplications of a Newton-Schulz step, up to a factor."""
        return self.numel * min(self.rows, self.columns)

    def pieces(self, limit: int, rank: int) -> list["Stack"]:
        """The same matrices in stacks of at most ``limit`` elements (or one matrix)."""
        matrix = self.rows * self.columns
        each = max(1, limit // matrix)
        result = []
        for first in range(0, self.count, each):
            count = min(each, self.count - first)
            start, end = first * matrix, (first + count) * matrix
            ranges = tuple((min(max(a, start), end) - start, min(max(b, start), end) - start) for a, b in self.ranges)
            skipped = max(0, min(start, self.ranges[rank][1]) - self.ranges[rank][0])
            result.append(replace(self, count=count, ranges=ranges, offset=self.offset + skipped))
        return result


@dataclass(frozen=True)
class Partition:
    """One flat float32 partition of this rank and the stacks in it; ``group`` is the process group that shares them."""

    flat: Tensor
    stacks: tuple[Stack, ...]
    group: object


def partitions(zero, names: dict[int, str], shapes: dict[str, tuple[int, int, int]]) -> list[Partition]:
    """Every partition of DeepSpeed's ZeRO optimizer that holds matrices.

    names: id of a model parameter -> name; shapes: name -> (count, rows, columns). TypeError for an optimizer that is built
    otherwise than those of ZeRO 1 to 3.
    """
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        found = [_zero3(zero, i, names) for i in range(len(zero.fp16_groups))]
    elif hasattr(zero, "single_partition_of_fp32_groups"):
        found = [_zero12(zero, i, names) for i in range(len(zero.bit16_groups))]
    else:
        raise TypeError(
            f"Muon cannot find the parameters in DeepSpeed's {type(zero).__name__}: use --ds.zero_stage 1, 2 or 3, without "
            "--ds.grad_accum_dtype fp32 at stage 1"
        )
    result = []
    for flat, spans, group in found:
        stacks = []
        for name, ranges, offset in spans:
            if name in shapes:
                stacks.append(Stack(name, *shapes[name], ranges, offset))
        if stacks:
            result.append(Partition(flat, tuple(stacks), group))
    return result


Spans = list[tuple[str, tuple[tuple[int, int], ...], int]]  # name, (first, end) by rank, offset in this rank's partition


def _zero12(zero, index: int, names: dict[int, str]) -> tuple[Tensor, Spans, object]:
    group = zero.real_dp_process_group[index]
    world, rank, size = dist.get_world_size(group), dist.get_rank(group), int(zero.partition_size[index])
    spans, position = [], 0
    for parameter in zero.round_robin_bit16_groups[index]:
        n = parameter.numel()
        edges = [min(max(r * size - position, 0), n) for r in range(world + 1)]
        ranges = tuple(zip(edges, edges[1:], strict=False))
        spans.append((names[id(parameter)], ranges, position + edges[rank] - rank * size))
        position += n
    return zero.single_partition_of_fp32_groups[index], spans, group


def _zero3(zero, index: int, names: dict[int, str]) -> tuple[Tensor, Spans, object]:
    group = zero.sub_group_process_groups[index]
    world = dist.get_world_size(group)
    spans, offset = [], 0
    for parameter in zero.fp16_groups[index]:
        n, part = parameter.ds_numel, parameter.partition_numel()
        edges = [min(r * part, n) for r in range(world + 1)]
        spans.append((names[id(parameter)], tuple(zip(edges, edges[1:], strict=False)), offset))
        offset += part
    return zero.fp32_partitioned_groups_flat[index], spans, group


def trained_names(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> its name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
