"""Whole matrices out of ZeRO's pieces and back: each is sent to one rank, orthogonalised there, and its pieces returned.

Two all-to-all exchanges a batch of matrices, in BF16, which is what the iteration starts from: half the bytes and not a bit
lost. Matrices are spread over the ranks by cost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qarl_openrlhf.optim.shards import Stack

STACK_ELEMENTS = 1 << 25  # of one batched product: 64 MiB in BF16
BATCH_ELEMENTS = 1 << 27  # a rank, of one exchange: 256 MiB


@dataclass(frozen=True)
class Batch:
    """Stacks that are exchanged together, and the rank that orthogonalises each."""

    stacks: tuple[Stack, ...]
    owners: tuple[int, ...]


def plan(stacks: tuple[Stack, ...], world: int, rank: int) -> list[Batch]:
    """The same on every rank, as it only depends on shapes."""
    small = [piece for stack in stacks for piece in stack.pieces(STACK_ELEMENTS, rank)]
    batches, current, size = [], [], 0
    for stack in small:
        if current and size + stack.numel > BATCH_ELEMENTS * world:
            batches.append(current)
            current, size = [], 0
        current.append(stack)
        size += stack.numel
    batches.append(current)
    return [Batch(tuple(batch), _spread(batch, world)) for batch in batches if batch]


def _spread(stacks: list[Stack], world: int) -> tuple[int, ...]:
    """Owner of each stack: the costliest first, to whoever has least to do."""
    load, owners = [0] * world, [0] * len(stacks)
    for i in sorted(range(len(stacks)), key=lambda i: -stacks[i].cost):
        owners[i] = min(range(world), key=lambda r: load[r])
        load[owners[i]] += stacks[i].cost
    return tuple(owners)


class Exchange:
    """Carries one rank's pieces to the owners of their matrices and back."""

    def __init__(self, group, device: torch.device):
        self.group, self.device = group, device
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def apply(self, batch: Batch, update: Tensor, transform: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """This rank's piece (BF16, flat) of ``transform(matrices [S, N, K])``, stack by stack.

        update: this rank's flat partition, in which the stacks' pieces lie.
        """
        sizes = [[b - a for a, b in stack.ranges] for stack in batch.stacks]
        pieces = [
            update[stack.offset : stack.offset + size[self.rank]].to(self.device).to(torch.bfloat16)  # converted on the card
            for stack, size in zip(batch.stacks, sizes, strict=True)
        ]
        by_owner = [[i for i, owner in enumerate(batch.owners) if owner == r] for r in range(self.world)]
        mine = by_owner[self.rank]
        out = [sum(sizes[i][self.rank] for i in owned) for owned in by_owner]
        into = [sum(sizes[i][r] for i in mine) for r in range(self.world)]

        arrived = self._all_to_all(_joined([pieces[i] for owned in by_owner for i in owned], self.device), out, into)
        whole = [torch.empty(batch.stacks[i].numel, dtype=torch.bfloat16, device=self.device) for i in mine]
        self._place(arrived, whole, batch, mine, sizes)
        for i, flat in zip(mine, whole, strict=True):
            stack = batch.stacks[i]
            flat.copy_(transform(flat.view(stack.count, stack.rows, stack.columns)).reshape(-1))
        back = [flat[slice(*batch.stacks[i].ranges[r])] for r in range(self.world) for i, flat in zip(mine, whole, strict=True)]

        returned = self._all_to_all(_joined(back, self.device), into, out)
        order = [i for owned in by_owner for i in owned]
        parts = dict(zip(order, returned.split([sizes[i][self.rank] for i in order]), strict=True))
        return [parts[i] for i in range(len(batch.stacks))]

    @staticmethod
    def _place(arrived: Tensor, whole: list[Tensor], batch: Batch, mine: list[int], sizes: list[list[int]]) -> None:
        position = 0
        for r in range(len(sizes[0])):
            for i, flat in zip(mine, whole, strict=True):
                first, end = batch.stacks[i].ranges[r]
                flat[first:end] = arrived[position : position + end - first]
                position += end - first

    def _all_to_all(self, sent: Tensor, sent_sizes: list[int], got_sizes: list[int]) -> Tensor:
        if self.world == 1:
            return sent
        got = torch.empty(sum(got_sizes), dtype=torch.bfloat16, device=self.device)
        # As bytes: not every backend knows BF16.
        dist.all_to_all_single(
            got.view(torch.uint8), sent.view(torch.uint8), [2 * n for n in got_sizes], [2 * n for n in sent_sizes], group=self.group
        )
        return got


def _joined(pieces: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.bfloat16, device=device)
