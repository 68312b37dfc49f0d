"""quantize_pack and dequantize: byte-equal with the torch reference on a CPU."""

import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))

from hard_weights import cases  # noqa: E402
from qarl_openrlhf.kernels import dequantize, quantize_pack, reference  # noqa: E402
from qarl_openrlhf.quant import QuantScheme, dequantize_weight, quantize_weight  # noqa: E402

N, K = 5, 384  # ragged: K is no power of two, N no multiple of anything
SCHEMES = ["w4a16:g32", "w4a16:g64", "w4a16", "w4a8", "w8a8", "fp8"]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().contiguous().view(torch.uint8)


def poison(device: str) -> None:
    """Fill freed memory with 0xFF, so that an output element that no thread writes shows."""
    blocks = [torch.full((1 << 22,), 255, dtype=torch.uint8, device=device) for _ in range(4)]
    del blocks


def quantize(w, scheme, copy):
    if scheme.name == "w4a8":
        return quantize_pack.quantize_w4a8(w, copy)
    if scheme.weight_format == "int4":
        return quantize_pack.quantize_int4(w, scheme.group_size, copy)
    return quantize_pack.quantize_row8(w, scheme.weight_format == "fp8", copy)


def check(w, scheme, device, case=None):
    expected = quantize_weight(w, scheme)
    codes = expected.weight if expected.weight_packed is None else expected.weight_packed
    for copy in (True, False) if device == "cuda" else (True,):  # the interpreter is slow
        poison(device)
        got_codes, got_scale, got_copy = quantize(w.to(device), scheme, copy)
        assert torch.equal(bits(got_scale), bits(expected.weight_scale)), case
        assert got_codes.shape == codes.shape and got_codes.dtype == codes.dtype
        assert torch.equal(bits(got_codes), bits(codes)), case
        if copy:
            assert torch.equal(bits(got_copy), bits(dequantize_weight(expected))), case
        else:
            assert got_copy.numel() == 0


@pytest.mark.parametrize("name", SCHEMES)
def test_quantizing_hard_weights(name, device):
    for case, w in cases(N, K).items():
        check(w, QuantScheme.parse(name), device, case)


def test_without_the_copy(device):
    w = cases(N, K)["random"].to(device)
    for name in SCHEMES:
        with_copy, without = (quantize(w, QuantScheme.parse(name), copy) for copy in (True, False))
        assert without[2].numel() == 0
        assert torch.equal(bits(with_copy[0]), bits(without[0])) and torch.equal(with_copy[1], without[1])


@pytest.mark.parametrize("name", SCHEMES)
def test_dequantizing_a_hard_weight(name, device):
    scheme = QuantScheme.parse(name)
    w = torch.stack([w for case, w in cases(N, K).items() if case in ("random", "outlier", "denormal", "ties_int4")])
    packed = quantize_weight(w, scheme)  # an expert axis, too
    codes = (packed.weight if packed.weight_packed is None else packed.weight_packed).to(device)
    scale = packed.weight_scale.to(device)
    kernel = {"w4a16": dequantize.dequantize_int4, "w4a8": dequantize.dequantize_w4a8}.get(
        scheme.name, dequantize.dequantize_row8
    )
    poison(device)
    assert torch.equal(bits(kernel(codes, scale)), bits(dequantize_weight(packed)))
    if scheme.name == "w4a8":
        operand, channel = dequantize.w4a8_operand(codes, scale)
        expected, expected_channel = reference.w4a8_codes(packed.weight_packed, packed.weight_scale)
        assert torch.equal(bits(operand), bits(expected)) and torch.equal(channel.cpu(), expected_channel)
        assert torch.equal(dequantize.w4a8_channel(scale).cpu(), expected_channel)


@pytest.mark.parametrize("name", ["w4a8", "w8a8", "fp8"])
def test_rows_in_several_chunks(name, device):
    check(torch.randn(3, 4608).mul(0.02).bfloat16(), QuantScheme.parse(name), device)


@pytest.mark.parametrize("k", [128, 640, 1536, 6144, 8960, 12288, 18944, 32768])
def test_w4a8_rows_of_every_launch(k, device):
    """Pieces of 32, 64 and 128 weights, one to three chunks of groups, up to 32 warps, padding."""
    check(torch.randn(2, k).mul(0.02).bfloat16(), QuantScheme.parse("w4a8"), device, k)


def test_w4a8_threads_hold_few_weights():
    """Of each row that there may be; a row of 12,288 in 4 warps left an SM room for 8 warps."""
    for groups in range(1, quantize_pack.MAX_ROW // 128 + 1):
        chunk, piece, warps = quantize_pack.w4a8_launch(groups)
        chunks = -(-groups // chunk)
        assert chunk * piece == 256 * warps and 128 % piece == 0
        assert chunks * (128 // piece) <= 6 and chunks * chunk < groups + chunk


def test_rows_too_long_are_refused(device):
    with pytest.raises(ValueError, match="32768"):
        quantize_pack.quantize_row8(torch.zeros(1, 40960, dtype=torch.bfloat16, device=device), True, False)


def test_a_nan_or_infinity_reaches_the_scale(device):
    """So that a diverged weight is noticed: the kernel's maximum must not drop NaN."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        w = torch.randn(8, 256).bfloat16()
        w[3, 200] = bad
        for name in SCHEMES:
            scheme = QuantScheme.parse(name)
            _, scale, _ = quantize(w.to(device), scheme, True)
            wrong = ~torch.isfinite(scale.cpu()).all(-1)
            assert wrong[3] and wrong.sum() == 1, (name, bad)


def test_every_pair_of_significands_rounds_as_a_division(device):
    """The claim behind one reciprocal a group: bf16(w * (1 / s)) == bf16(w / s) for all BF16 w and s."""
    numerator = torch.arange(128, 256)[:, None].expand(128, 128).float() * 2.0**-9
    for amax in torch.arange(128, 256, 64 if device == "cpu" else 1).float() * 2.0**-7:
        w = numerator.contiguous()
        w[:, 0] = amax
        check(w.bfloat16(), QuantScheme.parse("w4a16"), device)
        if device == "cuda":
            check(w.bfloat16(), QuantScheme.parse("w8a8"), device)


def test_non_contiguous_and_empty_weights(device):
    scheme = QuantScheme.parse("w4a16:g32")
    w = (torch.randn(64, 48) * 0.02).bfloat16().t()[:, :32]  # columns are not contiguous
    codes, scale, copy = quantize(w.to(device), scheme, True)
    expected = quantize_weight(w, scheme)
    assert torch.equal(bits(codes), bits(expected.weight_packed)) and torch.equal(bits(copy), bits(dequantize_weight(expected)))
    for name in SCHEMES:
        codes, scale, copy = quantize(torch.empty(0, 128, dtype=torch.bfloat16, device=device), QuantScheme.parse(name), True)
        assert codes.shape[0] == scale.shape[0] == copy.shape[0] == 0


def test_other_dtypes_are_refused(device):
    with pytest.raises(TypeError, match="bfloat16"):
        quantize_pack.quantize_int4(torch.randn(8, 128, device=device), 128, False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 3584), (96, 8960), (77, 12288), (64, 18944), (3, 100, 768), (576, 576)])
@pytest.mark.parametrize("name", SCHEMES)
def test_real_shapes(name, shape, device):
    scheme = QuantScheme.parse(name)
    if scheme.group_size and shape[-1] % scheme.group_size:
        pytest.skip("K does not divide into groups")
    check((torch.randn(shape) * 0.02).bfloat16(), scheme, device)
