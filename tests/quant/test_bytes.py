"""The quantizer's bytes against the compressed-tensors library's own functions."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from qarl_openrlhf.kernels import reference
from qarl_openrlhf.quant import (
    QuantError,
    QuantScheme,
    count_changed_codes,
    dequantize_weight,
    quantize_weight,
)
from hard_weights import cases

N, K = 16, 256
SCHEMES = ["w4a16:g32", "w4a16:g64", "w4a16", "w8a8", "fp8"]
CASES = list(cases(N, K))


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def library(w, scheme):
    """(codes int8/fp8, scale) by the library: min/max -> calculate_qparams -> quantize."""
    args = QuantizationArgs(**scheme.quantization_config([])["config_groups"]["group_0"]["weights"])
    groups = w.unflatten(-1, (-1, scheme.group_size or w.shape[-1]))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return quantize(w, scale, zero_point, args, dtype=args.pytorch_dtype()), scale, args


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_and_scales_equal_the_library(name, case):
    scheme, w = QuantScheme.parse(name), cases(N, K)[case]
    codes, scale, args = library(w, scheme)
    packed = quantize_weight(w, scheme)
    assert packed.weight_scale.dtype == torch.bfloat16
    assert torch.equal(bits(packed.weight_scale), bits(scale))
    if scheme.weight_format == "int4":
        assert torch.equal(packed.weight_packed, pack_to_int32(codes, 4))
        assert packed.weight_shape.tolist() == [N, K] and packed.weight_shape.dtype == torch.int64
    else:
        assert packed.weight.dtype == codes.dtype
        assert torch.equal(bits(packed.weight), bits(codes))
    assert torch.equal(bits(dequantize_weight(packed)), bits(dequantize(codes, scale, None, args).to(torch.bfloat16)))


def test_the_ties_are_ties_and_the_quotient_is_rounded_first():
    """The cases above must hold values on which other plausible quantizers differ."""
    w = cases(N, K)["ties_int4"]
    scale = reference.weight_scale(reference.absmax(w, 64), 7.5)
    quotient = reference.weight_quotient(w, scale, -8.0, 7.0)
    assert (quotient.float().remainder(1) == 0.5).float().mean() > 0.3
    w = (torch.randn(512, 1024) * 0.02).bfloat16()
    scale = reference.weight_scale(reference.absmax(w, 128), 7.5).float().repeat_interleave(128, -1)
    float32_quotient = (w.float() / scale).clamp(-8, 7).round()
    codes = reference.unpack_int4(quantize_weight(w, QuantScheme.parse("w4a16")).weight_packed)
    assert 0.002 < (codes != float32_quotient).float().mean() < 0.02


def test_float16_follows_the_library_too():
    scheme, w = QuantScheme.parse("w4a16:g64"), cases(N, K)["random"].to(torch.float16)
    codes, scale, _ = library(w, scheme)
    packed = quantize_weight(w, scheme)
    assert packed.weight_scale.dtype == torch.float16 and torch.equal(packed.weight_scale, scale)
    assert torch.equal(packed.weight_packed, pack_to_int32(codes, 4))


def test_float32_weights_are_quantized_as_their_bf16_rounding():
    w = torch.randn(N, K)
    for name in SCHEMES + ["w4a8"]:
        packed, rounded = (quantize_weight(x, QuantScheme.parse(name)) for x in (w, w.bfloat16()))
        assert packed.weight_scale.dtype == torch.float32
        assert torch.equal(packed.weight_scale, rounded.weight_scale.float())
        assert count_changed_codes(packed, rounded) == (0, N * K)


def test_pack_and_unpack_every_nibble():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 16)[:, :64].contiguous()
    packed = reference.pack_int4(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(reference.unpack_int4(packed), codes)
    assert torch.equal(unpack_from_int32(packed, 4, codes.shape), codes)
    assert int(packed[0, 0]) & 0xF == 0  # lowest nibble: lowest K, code -8


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "fp8", "w4a8"])
def test_an_expert_axis_changes_nothing(name):
    scheme = QuantScheme.parse(name)
    stacked = torch.stack([w for c, w in cases(128, K).items() if c in ("random", "zero_groups", "outlier")])
    together = quantize_weight(stacked, scheme)
    assert together.shape == (3, 128, K)
    for e, w in enumerate(stacked):
        alone = quantize_weight(w, scheme)
        for key, tensor in alone.tensors().items():
            if key != "weight_shape":
                assert torch.equal(bits(together.tensors()[key][e]), bits(tensor)), key
        assert torch.equal(dequantize_weight(together)[e], dequantize_weight(alone))


def test_requantizing_a_dequantized_weight_is_not_idempotent():
    """Why nothing may be quantized twice: codes change if it is."""
    w = cases(N, K)["random"]
    first = quantize_weight(w, QuantScheme.parse("w4a16"))
    second = quantize_weight(dequantize_weight(first), QuantScheme.parse("w4a16"))
    assert count_changed_codes(first, second)[0] > 0


@pytest.mark.parametrize("name", ["w4a16:g64", "w8a8", "fp8"])
def test_changed_codes_are_counted(name):
    scheme, w = QuantScheme.parse(name), cases(N, K)["random"]
    old = quantize_weight(w, scheme)
    assert count_changed_codes(old, quantize_weight(w.clone(), scheme)) == (0, N * K)
    w[3, 9], w[3, 8], w[7, 100] = -w[3, 9], -w[3, 8], 0  # neighbours share a byte; no group maximum moves
    new = quantize_weight(w, scheme)
    expected = (dequantize_weight(old) != dequantize_weight(new)).sum()
    assert count_changed_codes(old, new) == (int(expected), N * K) and expected == 3
    with pytest.raises(QuantError, match="cannot compare"):
        count_changed_codes(old, quantize_weight(w[:8], scheme))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["w4a16:g64", "w8a8", "fp8", "w4a8"])
def test_a_bad_weight_is_an_error_naming_the_layer(name, bad):
    w = torch.randn(128, 256).bfloat16()
    w[77, 130] = bad
    with pytest.raises(QuantError, match=r"model\.layers\.3\.mlp\.up_proj: 1 of 32768"):
        quantize_weight(w, QuantScheme.parse(name), name="model.layers.3.mlp.up_proj")


def test_bytes_per_weight():
    w = torch.randn(256, 1024).bfloat16()
    packed = quantize_weight(w, QuantScheme.parse("w4a16"))
    assert (packed.nbytes - 16) / w.numel() == pytest.approx(0.5 + 2 / 128)
    assert list(packed.tensors()) == ["weight_packed", "weight_scale", "weight_shape"]
    assert list(quantize_weight(w, QuantScheme.parse("fp8")).tensors()) == ["weight", "weight_scale"]


def test_wrong_inputs_are_refused():
    for w in (torch.zeros(8), torch.zeros(8, 64, dtype=torch.int8)):
        with pytest.raises(QuantError, match=r"q_proj: expected a float weight \[N, K\]"):
            quantize_weight(w, QuantScheme.parse("w8a8"), name="q_proj")
    with pytest.raises(QuantError, match="q_proj.*w4a16:g32 or w4a16:g64"):
        quantize_weight(torch.zeros(8, 192), QuantScheme.parse("w4a16"), name="q_proj")
    with pytest.raises(QuantError, match="no quantized weights"):
        quantize_weight(torch.zeros(8, 64), QuantScheme.parse("bf16"))
