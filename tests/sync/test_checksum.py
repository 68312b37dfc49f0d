"""The checksum against its definition in Python integers, and what it must notice."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_openrlhf.sync import checksum as module
from qarl_openrlhf.sync.checksum import checksum


def definition(raw: bytes) -> int:
    raw += b"\0" * (-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=0, max_size=300))
def test_equals_the_definition(raw):
    tensor = torch.tensor(list(raw), dtype=torch.uint8)
    assert checksum(tensor) == definition(raw)


def test_chunks_do_not_matter(monkeypatch):
    torch.manual_seed(0)
    tensor = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int32)
    expected = definition(tensor.numpy().tobytes())
    assert checksum(tensor) == expected
    for size in (1, 7, 4999, 5000):
        monkeypatch.setattr(module, "CHUNK_WORDS", size)
        assert checksum(tensor) == expected


def test_wraps_around():
    assert checksum(torch.full((2**17,), -1, dtype=torch.int32)) == definition(b"\xff" * 2**19)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.int64])
def test_any_dtype_view_and_shape(dtype):
    torch.manual_seed(0)
    whole = torch.randn(9, 7).mul(50).to(dtype)
    for tensor in (whole, whole[1:, :], whole.t(), whole[3, 1:4], whole[0, 0]):
        raw = tensor.contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert checksum(tensor) == definition(raw)


def test_every_single_flipped_bit_and_every_swap_of_words_shows():
    torch.manual_seed(0)
    tensor = torch.randint(0, 255, (65,), dtype=torch.uint8)
    before = checksum(tensor)
    for byte in range(65):
        for bit in range(8):
            tensor[byte] ^= 1 << bit
            assert checksum(tensor) != before
            tensor[byte] ^= 1 << bit
    words = torch.randint(-(2**31), 2**31 - 1, (17,), dtype=torch.int32)
    for i, j in combinations(range(17), 2):
        swapped = words.clone()
        swapped[[i, j]] = words[[j, i]]
        assert checksum(swapped) != checksum(words)


def test_changes_that_cancel_do_not_show():
    """What the docstring says is not noticed, and why: one exchange adds what its mirror image takes away."""
    one, mirrored = (torch.tensor(words, dtype=torch.int32) for words in ([0, 1, 1, 0], [1, 0, 0, 1]))
    assert checksum(one) == checksum(mirrored)
    assert len({checksum(torch.tensor(words)) for words in ([0, 1, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1])}) == 3  # either one alone
    assert "0, 1, 1, 0 and 1, 0, 0, 1 have the same sum" in module.__doc__
