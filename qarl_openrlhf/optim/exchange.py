"""Whole matrices out of ZeRO's pieces and back: each is sent to one rank, orthogonalised there, and its pieces returned.

Two all-to-all exchanges a batch of matrices, in BF16, which is what the iteration starts from: half the bytes and not a bit
lost. Matrices are spread over the ranks by cost. :func:`peak_bytes` says what one exchange takes beside the partitions.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from qarl_openrlhf.optim.shards import Stack

STACK_ELEMENTS = 1 << 25  # of one batched product: 64 MiB in BF16
BATCH_ELEMENTS = 1 << 27  # that a rank sends, and that it orthogonalises, in one exchange: 256 MiB


@dataclass(frozen=True)
class Batch:
    """Stacks that are exchanged together, and the rank that orthogonalises each."""

    stacks: tuple[Stack, ...]
    owners: tuple[int, ...]


def plan(stacks: tuple[Stack, ...], world: int, rank: int) -> list[Batch]:
    """The same on every rank, as it only depends on shapes.

    In a batch no rank sends or orthogonalises more than ``BATCH_ELEMENTS``, or one stack where that is larger.
    """
    small = _dealt([piece for stack in stacks for piece in stack.pieces(STACK_ELEMENTS, rank)], world)
    limit = max((stack.numel for stack in small), default=0)
    limit = max(limit, BATCH_ELEMENTS)
    batches, current = [], []
    for stack in small:
        if current and _busiest([*current, stack], world) > limit:
            batches.append(current)
            current = []
        current.append(stack)
    batches.append(current)
    return [Batch(tuple(batch), _spread(batch, world)) for batch in batches if batch]


def _dealt(stacks: list[Stack], world: int) -> list[Stack]:
    """One of each rank in turn, by who holds most of it: ZeRO-1/2 lay neighbours on one rank, which would send a whole batch alone."""
    held: list[list[Stack]] = [[] for _ in range(world)]
    for stack in stacks:
        held[max(range(world), key=lambda r: stack.ranges[r][1] - stack.ranges[r][0])].append(stack)
    return [stack for stack in chain.from_iterable(zip_longest(*held)) if stack is not None]


def _busiest(stacks: list[Stack], world: int) -> int:
    """Most elements that one rank sends or orthogonalises if these are exchanged together."""
    sent, owned = [0] * world, [0] * world
    for stack, owner in zip(stacks, _spread(stacks, world), strict=True):
        owned[owner] += stack.numel
        for r, (first, end) in enumerate(stack.ranges):
            sent[r] += end - first
    return max(*sent, *owned)


def peak_bytes(shapes: Iterable[tuple[int, int, int]], elements: int, world: int, in_float32: bool = False) -> int:
    """Most that one exchange takes on a rank: stacks of these (count, rows, columns), ``elements`` in all.

    in_float32: products are float32 ones (``kernels.product.in_float32``).
    """
    largest = work = 0
    for count, rows, columns in shapes:
        count = min(count, max(1, STACK_ELEMENTS // (rows * columns)))
        numel, gram = count * rows * columns, count * min(rows, columns) ** 2
        largest = max(largest, numel)
        # newton_schulz: the iterate and its successor, two grams; in float32 also both factors, the sum and the result.
        work = max(work, 14 * numel + 8 * gram if in_float32 else 4 * numel + 4 * gram)
    held = 2 * largest  # the direction that was yielded last
    if world == 1:  # one stack at a time
        return held + 2 * largest + work
    each = min(max(BATCH_ELEMENTS, largest), elements)
    return held + 2 * each + max(2 * each, work)  # sent and received at once, or whole matrices and the iteration


def _spread(stacks: list[Stack], world: int) -> tuple[int, ...]:
    """Owner of each stack: the costliest first, to whoever has least to do."""
    load, owners = [0] * world, [0] * len(stacks)
    for i in sorted(range(len(stacks)), key=lambda i: -stacks[i].cost):
        owners[i] = min(range(world), key=lambda r: load[r])
        load[owners[i]] += stacks[i].cost
    return tuple(owners)


def _matrices(flat: Tensor, stack: Stack) -> Tensor:
    return flat.view(stack.count, stack.rows, stack.columns)


class Exchange:
    """Carries one rank's pieces to the owners of their matrices and back."""

    def __init__(self, group, device: torch.device):
        self.group, self.device = group, device
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def apply(self, batch: Batch, update: Tensor, transform: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """This rank's piece (BF16, flat) of ``transform(matrices [S, N, K])``, stack by stack.

        update: this rank's flat partition, in which the stacks' pieces lie. All ranks exhaust the iterator. Each tensor is dropped
        as soon as the next is made of it: the peak is counted (:func:`peak_bytes`).
        """
        sizes = [[b - a for a, b in stack.ranges] for stack in batch.stacks]
        if self.world == 1:
            for i, stack in enumerate(batch.stacks):
                yield transform(_matrices(self._piece(update, batch, sizes, i), stack)).reshape(-1)
            return
        by_owner = [[i for i, owner in enumerate(batch.owners) if owner == r] for r in range(self.world)]
        order = [i for owned in by_owner for i in owned]
        mine = by_owner[self.rank]
        out = [sum(sizes[i][self.rank] for i in owned) for owned in by_owner]
        into = [sum(sizes[i][r] for i in mine) for r in range(self.world)]

        arrived = self._all_to_all(self._joined([self._piece(update, batch, sizes, i) for i in order]), out, into)
        whole = self._placed(arrived, batch, mine)
        del arrived
        for at, i in enumerate(mine):
            _matrices(whole[at], batch.stacks[i]).copy_(transform(_matrices(whole[at], batch.stacks[i])))
        back = self._joined([flat[slice(*batch.stacks[i].ranges[r])] for r in range(self.world) for i, flat in zip(mine, whole, strict=True)])
        del whole

        returned = self._all_to_all(back, into, out)
        del back
        parts = dict(zip(order, returned.split([sizes[i][self.rank] for i in order]), strict=True))
        for i in range(len(batch.stacks)):
            yield parts[i].clone()  # a view would keep all of them for as long as the caller has the last

    def _piece(self, update: Tensor, batch: Batch, sizes: list[list[int]], i: int) -> Tensor:
        offset = batch.stacks[i].offset
        return update[offset : offset + sizes[i][self.rank]].to(self.device).to(torch.bfloat16)  # converted on the card

    def _placed(self, arrived: Tensor, batch: Batch, mine: list[int]) -> list[Tensor]:
        """The whole stacks that this rank orthogonalises, of what has arrived, rank by rank."""
        whole = [torch.empty(batch.stacks[i].numel, dtype=torch.bfloat16, device=self.device) for i in mine]
        position = 0
        for r in range(self.world):
            for i, flat in zip(mine, whole, strict=True):
                first, end = batch.stacks[i].ranges[r]
                flat[first:end] = arrived[position : position + end - first]
                position += end - first
        return whole

    def _all_to_all(self, sent: Tensor, sent_sizes: list[int], got_sizes: list[int]) -> Tensor:
        got = torch.empty(sum(got_sizes), dtype=torch.bfloat16, device=self.device)
        # As bytes: not every backend knows BF16.
        dist.all_to_all_single(
            got.view(torch.uint8), sent.view(torch.uint8), [2 * n for n in got_sizes], [2 * n for n in sent_sizes], group=self.group
        )
        return got

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.bfloat16, device=self.device)
