"""A checksum that is the same number on every device.

The bytes of a tensor are read as little-endian 32-bit words w_0, w_1, ... (the last one padded with zeros) and

    checksum = sum_i w_i * (2 i + 1)   modulo 2^64

Every weight 2 i + 1 is odd, hence invertible modulo 2^64: a change of any single word always changes the sum. Two different words
that change places change it by 2 (i - j) (w_j - w_i), which is not 0 in tensors below 8 GiB. Several changes can cancel each
other, as exchanges that mirror each other do: 0, 1, 1, 0 and 1, 0, 0, 1 have the same sum. Integer additions may be made in any order, so CPU and GPU agree bit for bit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# 4 MiB of words: large enough to amortise the launches, small enough that the int64 temporaries stay in a CPU's cache.
CHUNK_WORDS = 1 << 18


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8 [nbytes]; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor of any dtype and shape, in [0, 2^64). Dtype and shape themselves are not part of it."""
    raw = as_bytes(tensor)
    if raw.storage_offset() % 4:
        raw = raw.clone()  # words must start at a multiple of their size
    whole = raw.numel() // 4 * 4
    words = raw[:whole].view(torch.int32)
    if whole < raw.numel():
        tail = torch.zeros(4, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        words = torch.cat([words, tail.view(torch.int32)])
    factors = 2 * torch.arange(min(CHUNK_WORDS, words.numel()), device=raw.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), CHUNK_WORDS):
        # int32 words with the top bit set are negative here, i.e. w_i - 2^32: put right by the mask.
        part = words[start : start + CHUNK_WORDS].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        total += (part * factors[: part.numel()]).sum() + 2 * start * part.sum()
    return int(total.item()) % 2**64


def digests(
    flat: Tensor, entries: Sequence[tuple[int, int, torch.dtype]], *, sums: bool = True
) -> Callable[[], tuple[list[int], list[int]]]:
    """A call gives (checksums, numbers of NaN and infinite values) of the pieces (offset, nbytes, dtype) of a bucket.

    flat: uint8 [nbytes]. sums: False where the checksums are not asked for; they are then 0 on a CPU, where each takes a pass of its own.
    On a GPU one kernel, started here, reads the bucket once; see :mod:`qarl_openrlhf.kernels.digest`.
    """
    if flat.is_cuda:
        from qarl_openrlhf.kernels.digest import digest

        return digest(flat, entries)
    pieces = [flat[offset : offset + nbytes] for offset, nbytes, _ in entries]
    return lambda: (
        [checksum(piece) if sums else 0 for piece in pieces],
        [
            non_finite(piece.view(dtype)) if dtype.is_floating_point else 0
            for piece, (_, _, dtype) in zip(pieces, entries, strict=True)
        ],
    )


def non_finite(tensor: Tensor) -> int:
    """Number of NaN and infinite values."""
    return int((~torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor)).sum())
