"""Muon's exchange: each rank gets the pieces that the whole matrices have, in batches of bounded size, within the memory planned for."""

import threading
import time
from types import SimpleNamespace as N

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from qarl_openrlhf.optim import exchange
from qarl_openrlhf.optim.exchange import Exchange, peak_bytes, plan
from qarl_openrlhf.optim.newton_schulz import newton_schulz
from qarl_openrlhf.optim.shards import Stack

SHAPES = ((1, 24, 40), (6, 16, 8), (1, 64, 32), (1, 8, 8), (5, 32, 32), (1, 40, 24))


def laid_out(shapes, world: int, rank: int, stage: int) -> tuple[tuple[Stack, ...], int]:
    """(stacks, elements of the rank's partition) as ``shards`` reads them off DeepSpeed's optimizers."""
    total = sum(count * rows * columns for count, rows, columns in shapes)
    stacks, position, offset, size = [], 0, 0, -(-total // world)
    for i, (count, rows, columns) in enumerate(shapes):
        n = count * rows * columns
        part = -(-n // world)
        edges = [min(r * part, n) if stage == 3 else min(max(r * size - position, 0), n) for r in range(world + 1)]
        where = offset if stage == 3 else position + edges[rank] - rank * size
        stacks.append(Stack(f"w{i}", count, rows, columns, tuple(zip(edges, edges[1:], strict=False)), where))
        position, offset = position + n, offset + part
    return tuple(stacks), offset if stage == 3 else size


def on_rank(world: int, rank: int) -> Exchange:
    made = object.__new__(Exchange)
    made.group, made.device, made.world, made.rank = rank, torch.device("cpu"), world, rank
    return made


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(exchange, "STACK_ELEMENTS", 512)
    monkeypatch.setattr(exchange, "BATCH_ELEMENTS", 2048)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_pieces_are_those_of_the_whole_matrices(world, stage, small_batches, monkeypatch):
    """Bit for bit; the ranks are threads, and what they send meets in a dictionary."""
    gate, sent = threading.Barrier(world), {}

    def all_to_all_single(got, mine, got_sizes, sent_sizes, group):
        sent[group] = mine.split(sent_sizes)
        gate.wait(30)
        got.copy_(torch.cat([sent[r][group] for r in range(world)]))
        assert [len(sent[r][group]) for r in range(world)] == got_sizes
        gate.wait(30)

    monkeypatch.setattr(exchange, "dist", N(all_to_all_single=all_to_all_single))
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)]
    expected = [torch.cat([newton_schulz(part, 5) for part in w.split(max(1, 512 // w[0].numel()))]).reshape(-1) for w in whole]
    results, sizes = {}, []

    def run(rank: int) -> None:
        stacks, size = laid_out(SHAPES, world, rank, stage)
        update, result = torch.zeros(size), torch.zeros(size, dtype=torch.bfloat16)
        for stack, w in zip(stacks, whole, strict=True):
            first, end = stack.ranges[rank]
            update[stack.offset : stack.offset + end - first] = w.reshape(-1)[first:end]
        batches = plan(stacks, world, rank)
        sizes.append(len(batches))
        for batch in batches:
            for stack, piece in zip(batch.stacks, on_rank(world, rank).apply(batch, update, lambda m: newton_schulz(m, 5)), strict=True):
                result[stack.offset : stack.offset + piece.numel()] = piece
        results[rank] = [result[s.offset : s.offset + s.ranges[rank][1] - s.ranges[rank][0]] for s in stacks]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert set(results) == set(range(world)) and min(sizes) == max(sizes) > 1
    for i, flat in enumerate(expected):
        assert torch.equal(torch.cat([results[r][i] for r in range(world)]), flat)


QWEN3_8B = ((1, 4096, 4096), (1, 1024, 4096), (1, 1024, 4096), (1, 4096, 4096), *[(1, 12288, 4096)] * 2, (1, 4096, 12288)) * 36
QWEN3_30B_A3B = ((1, 4096, 2048), (1, 512, 2048), (1, 512, 2048), (1, 2048, 4096), (256, 768, 2048), (128, 2048, 768)) * 48


@pytest.mark.parametrize("shapes", [QWEN3_8B, QWEN3_30B_A3B], ids=["8b", "30b-a3b"])
@pytest.mark.parametrize("world, stage", [(1, 2), (2, 1), (8, 2), (8, 3), (64, 3)])
def test_no_rank_sends_or_gets_more_than_a_batch(shapes, world, stage):
    """Under ZeRO-1/2, too, where neighbours lie on one rank and the others would have nothing to send."""
    started = time.monotonic()
    batches = plan(laid_out(shapes, world, 0, stage)[0], world, 0)
    assert time.monotonic() - started < 10
    total = sum(count * rows * columns for count, rows, columns in shapes)
    assert sum(stack.numel for batch in batches for stack in batch.stacks) == total
    for batch in batches:
        owned, sent = [0] * world, [0] * world
        for stack, owner in zip(batch.stacks, batch.owners, strict=True):
            owned[owner] += stack.numel
            for r, (first, end) in enumerate(stack.ranges):
                sent[r] += end - first
        assert max(*owned, *sent) <= exchange.BATCH_ELEMENTS
    assert len(batches) <= 2.3 * total / (exchange.BATCH_ELEMENTS * world) + 2  # few, as each waits for its slowest rank
    key = [[(s.name, s.ranges) for s in batch.stacks] for batch in batches]
    there = plan(laid_out(shapes, world, world - 1, stage)[0], world, world - 1)
    assert key == [[(s.name, s.ranges) for s in batch.stacks] for batch in there]


def iteration(x: torch.Tensor) -> torch.Tensor:
    """Holds what newton_schulz holds on a card, without what products on a CPU take for themselves."""
    x = x.clone()
    gram, polynomial = (torch.empty(x.shape[0], *[min(x.shape[1:])] * 2, dtype=x.dtype) for _ in range(2))
    result = x.clone()
    del gram, polynomial
    return result


@pytest.mark.parametrize("world, stage", [(1, 2), (2, 2), (2, 3), (4, 2)])
def test_an_exchange_takes_what_is_planned_for(world, stage, monkeypatch):
    """What the allocator has handed out at the most, of a step of rank 0, whose peers send zeros."""
    monkeypatch.setattr(exchange, "STACK_ELEMENTS", 1 << 16)
    monkeypatch.setattr(exchange, "BATCH_ELEMENTS", 1 << 18)
    monkeypatch.setattr(exchange, "dist", N(all_to_all_single=lambda got, *_, group: got.zero_()))
    shapes = ((1, 256, 256), (1, 512, 64), (3, 128, 256), (1, 64, 512), (1, 256, 256)) * 8
    stacks, size = laid_out(shapes, world, 0, stage)
    update, flat, ours = torch.ones(size), torch.zeros(size), on_rank(world, 0)
    batches = plan(stacks, world, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for batch in batches:
            for stack, piece in zip(batch.stacks, ours.apply(batch, update, iteration), strict=True):
                flat[stack.offset : stack.offset + piece.numel()].add_(piece, alpha=-1e-3)
    held = peak = 0
    for event in sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    planned = peak_bytes(shapes, sum(c * r * k for c, r, k in shapes), world)
    assert 0.5 * planned < peak <= 1.05 * planned, f"{peak / 2**20:.2f} MiB, planned {planned / 2**20:.2f}"


def test_the_bound_that_the_documentation_gives():
    mib = 2**20
    shapes = ((1, 4096, 4096), (256, 768, 2048))  # matrices of at most 64 MiB
    assert peak_bytes(shapes, 10**10, 8) <= 576 * mib
    assert peak_bytes(((1, 4096, 12288),), 10**10, 8) == (96 + 256 + 4 * 16 + 4 * 48) * mib
    assert peak_bytes(shapes, 10**10, 1) <= 384 * mib
