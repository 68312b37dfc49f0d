"""Checksum and count of non-finite values of every tensor of a flat bucket, in one pass over its bytes.

The checksum is that of :mod:`qarl_openrlhf.sync.checksum`: sum of the 32-bit words times odd weights, modulo 2^64. Additions
of integers may come in any order, so the kernel may use atomics and still agree with the CPU bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32768  # words a program: 128 KiB; the 15 bits of an index within it times 32768 words of 32 bits stay under 2^64
BLOCK = 2048  # words at a time
ALIGNMENT = 16

# How non-finite values show in a word, by dtype; everything else has none.
KINDS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.float8_e4m3fn: 4}


@triton.jit
def _halves(w, MASK: tl.constexpr):
    return ((w & MASK) == MASK).to(tl.int32) + (((w >> 16) & MASK) == MASK).to(tl.int32)


@triton.jit
def _bytes(w):
    total = ((w & 0x7F) == 0x7F).to(tl.int32)
    total += (((w >> 8) & 0x7F) == 0x7F).to(tl.int32)
    total += (((w >> 16) & 0x7F) == 0x7F).to(tl.int32)
    total += (((w >> 24) & 0x7F) == 0x7F).to(tl.int32)
    return total


@triton.jit
def _non_finite(w, kind):
    """Number of NaN and infinite values in 32-bit words (e4m3fn has no infinity)."""
    count = tl.zeros_like(w)
    if kind == 1:
        count = _halves(w, 0x7F80)
    if kind == 2:
        count = _halves(w, 0x7C00)
    if kind == 3:
        count = ((w & 0x7F800000) == 0x7F800000).to(tl.int32)
    if kind == 4:
        count = _bytes(w)
    return count


@triton.jit
def _add_block(words, index, w_sum, w_index_sum, count, kind, limit, MASKED: tl.constexpr):
    if MASKED:
        w = tl.load(words + index, mask=index < limit, other=0)
    else:
        w = tl.load(words + index)
    wide = w.to(tl.uint32, bitcast=True).to(tl.uint64)
    # 15-bit index times 32-bit word: one multiply-add of the hardware, where a 64-bit product takes several.
    w_index_sum += wide * index.to(tl.uint32).to(tl.uint64)
    return w_sum + wide, w_index_sum, count + _non_finite(w, kind)


@triton.jit
def _digest_kernel(words, raw, entries, chunks, sums, bad, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    entry = tl.load(chunks + 2 * program)
    first = tl.load(chunks + 2 * program + 1)
    offset = tl.load(entries + 3 * entry)
    nbytes = tl.load(entries + 3 * entry + 1)
    kind = tl.load(entries + 3 * entry + 2)
    whole = nbytes // 4
    here = words + 4 * (offset // 16) + first  # ALIGNMENT: 16-byte loads
    lane = tl.arange(0, BLOCK)
    w_sum = tl.zeros((BLOCK,), dtype=tl.uint64)
    w_index_sum = tl.zeros((BLOCK,), dtype=tl.uint64)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    if first + CHUNK <= whole:
        for start in range(0, CHUNK, BLOCK):
            w_sum, w_index_sum, count = _add_block(here, start + lane, w_sum, w_index_sum, count, kind, CHUNK, False)
    else:
        for start in range(0, CHUNK, BLOCK):
            w_sum, w_index_sum, count = _add_block(here, start + lane, w_sum, w_index_sum, count, kind, whole - first, True)
    # sum of w_i (2 i + 1) with i = first + index
    total = tl.sum(w_sum.to(tl.int64, bitcast=True), 0) * (2 * first + 1) + 2 * tl.sum(w_index_sum.to(tl.int64, bitcast=True), 0)
    found = tl.sum(count, 0)
    if (nbytes % 4 != 0) & (whole >= first) & (whole < first + CHUNK):  # the last word, padded with zeros
        byte = tl.arange(0, 4)
        part = tl.load(raw + offset + 4 * whole + byte, mask=4 * whole + byte < nbytes, other=0).to(tl.int64)
        tail = tl.sum(part << (8 * byte).to(tl.int64), 0)
        total += tail * (2 * whole + 1)
        found += tl.sum(_non_finite(tl.full((1,), 0, tl.int32) + tail.to(tl.int32), kind), 0)
    tl.atomic_add(sums + entry, total)
    if found > 0:
        tl.atomic_add(bad + entry, found.to(tl.int64))


def digest(flat: Tensor, entries: Sequence[tuple[int, int, torch.dtype]]) -> Callable[[], tuple[list[int], list[int]]]:
    """Start to compute (checksums in [0, 2^64), numbers of non-finite values) of pieces of ``flat``; a call waits for them.

    flat: uint8 [nbytes], nbytes a multiple of 4. entries: (offset, a multiple of 16; nbytes; dtype) of each piece. ValueError
    for another offset.
    """
    if not entries:
        return lambda: ([], [])
    count = len(entries)
    tables, programs = _tables(tuple(entries), flat.device, CHUNK)
    both = torch.zeros(2, count + count % 2, dtype=torch.int64, device=flat.device)  # rows that start at multiples of 16 bytes
    words, chunk_table, block = flat.view(torch.int32), tables[3 * count :], min(BLOCK, CHUNK)
    with torch.cuda.device_of(flat):  # Triton launches on the current device; the interpreter has none
        _digest_kernel[(programs,)](words, flat, tables, chunk_table, both[0], both[1], CHUNK=CHUNK, BLOCK=block, num_warps=8)

    def results() -> tuple[list[int], list[int]]:
        found = both[:, :count].tolist()
        return [value % 2**64 for value in found[0]], found[1]

    return results


@lru_cache(maxsize=1024)
def _tables(entries: tuple, device: torch.device, chunk: int) -> tuple[Tensor, int]:
    """(int64: offset, nbytes, kind of each entry, then entry and first word of each program; number of programs).

    Kept, for a run pushes the same buckets every time.
    """
    table = np.array([(offset, nbytes, KINDS.get(dtype, 0)) for offset, nbytes, dtype in entries], dtype=np.int64)
    if (table[:, 0] % ALIGNMENT).any():
        raise ValueError(f"pieces of a bucket start at multiples of {ALIGNMENT} bytes")
    counts = np.maximum(1, -(-table[:, 1] // (4 * chunk)))
    owner = np.repeat(np.arange(len(entries)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = np.stack([owner, within * chunk], axis=1)
    return torch.from_numpy(np.concatenate([table.reshape(-1), chunks.reshape(-1)])).to(device), len(chunks)
