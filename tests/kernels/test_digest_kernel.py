"""One pass over a bucket on the card gives the checksums and counts of non-finite values that the CPU gives."""

import pytest
import torch

pytest.importorskip("triton")

from qarl_openrlhf.kernels import digest as module  # noqa: E402
from qarl_openrlhf.sync.checksum import digests  # noqa: E402

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int8, torch.int64)


def bucket(pieces):
    """uint8 [nbytes] and its entries, each piece at a multiple of 16 with poison between them."""
    size = sum(-(-p.nbytes // 16) * 16 for p in pieces)
    flat, entries, offset = torch.full((size,), 0xFF, dtype=torch.uint8), [], 0
    for p in pieces:
        flat[offset : offset + p.nbytes] = p.contiguous().reshape(-1).view(torch.uint8)
        entries.append((offset, p.nbytes, p.dtype))
        offset += -(-p.nbytes // 16) * 16
    return flat, entries


@pytest.mark.parametrize("chunk", [16, 4096, module.CHUNK])
def test_equals_the_cpu(device, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    pieces = [torch.randn(n).mul(20).to(dtype) for dtype in DTYPES for n in (1, 3, 5, 15, 16, 63, 64, 65, 257)]
    pieces.append(torch.full((129,), -1, dtype=torch.int32))
    if chunk > 16:
        pieces.append(torch.full((2 * module.CHUNK + 5,), -1, dtype=torch.int32))  # the largest sums
    for dtype in DTYPES[:4]:
        spoiled = torch.randn(77).to(dtype)
        spoiled[[0, 31, 76]] = NAN
        pieces.append(spoiled)
    for dtype in DTYPES[:3]:
        pieces.append(torch.tensor([INF, 1.0, -INF], dtype=dtype))
    flat, entries = bucket(pieces)
    sums, bad = module.digest(flat.to(device), entries)()
    assert (sums, bad) == digests(flat, entries)()
    assert bad[-7:] == [3, 3, 3, 3, 2, 2, 2]
    assert not any(bad[: len(DTYPES) * 9])


def test_nothing(device):
    assert module.digest(torch.empty(0, dtype=torch.uint8, device=device), [])() == ([], [])


def test_an_offset_between_words_of_16_bytes_is_refused(device):
    with pytest.raises(ValueError, match="multiples of 16"):
        module.digest(torch.zeros(64, dtype=torch.uint8, device=device), [(4, 8, torch.int32)])
