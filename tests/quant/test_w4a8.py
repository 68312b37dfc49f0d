"""W4A8: the stored scales survive vLLM's conversion, and the learner multiplies by what the kernel looks up."""

import pytest
import torch
from hard_weights import cases
from qarl_openrlhf.kernels import reference
from qarl_openrlhf.quant import QuantScheme, dequantize_weight, quantize_weight

W4A8 = QuantScheme.parse("w4a8")
W4A16 = QuantScheme.parse("w4a16")


def vllm_scales(scale):
    """vLLM 0.29 quant_utils.convert_bf16_scales_to_fp8 with QuantFP8 per token, op by op (the CUDA kernel divides)."""
    amax = scale.float().abs().amax(-1, keepdim=True)
    channel = torch.maximum(amax / 448.0, torch.tensor(1.0 / (448.0 * 512.0)))
    fp8 = torch.clamp(scale.float() / channel, -448.0, 448.0).to(torch.float8_e4m3fn)
    return (fp8.float() / 8.0).to(torch.float8_e4m3fn), channel * 8.0


def test_the_transcription_is_of_the_installed_vllm():
    """The steps that vLLM's Python shows: QuantFP8.forward_native (which differs only in multiplying by 1 / c)."""
    quant = pytest.importorskip("vllm.model_executor.layers.quantization.input_quant_fp8")
    assert quant._FP8_MIN_SCALING_FACTOR == reference.FP8_MIN_SCALE == 1.0 / (448.0 * 512.0)
    scale = quantize_weight((torch.randn(64, 1024) * 0.02).bfloat16(), W4A16).weight_scale

    class PerToken:  # QuantFP8 needs an engine's config to be built; forward_native needs only these
        is_group_quant = static = False
        group_shape = quant.GroupShape.PER_TOKEN
        num_token_padding = None

    fp8, channel = quant.QuantFP8.forward_native(PerToken(), scale)
    expected = (fp8.float() / 8.0).to(torch.float8_e4m3fn), channel * 8.0
    group, channel = reference.w4a8_engine_scales(scale)
    assert torch.equal(channel, expected[1])
    assert (group.float() != expected[0].float()).float().mean() < 0.01


@pytest.mark.parametrize("case", list(cases(128, 1024)))
def test_stored_scales_are_a_fixed_point_of_the_engine_conversion(case):
    packed = quantize_weight(cases(128, 1024)[case], W4A8)
    group, channel = vllm_scales(packed.weight_scale)
    assert torch.equal(group.float(), reference.w4a8_engine_scales(packed.weight_scale)[0].float())
    # The engine's scale is the stored one up to the BF16 rounding of the store, and storing it again changes nothing.
    assert torch.equal((group.float() * channel).bfloat16(), packed.weight_scale)
    assert (group.float() > 0).all()
    again = reference.quantize_int4_with_scale(cases(128, 1024)[case], (group.float() * channel).bfloat16())
    assert torch.equal(again, packed.weight_packed)


def test_most_plain_w4a16_scales_would_move():
    """Why the scales are rounded first (DESIGN section 2: 91 % move, by 2.3 % on average)."""
    scale = quantize_weight((torch.randn(512, 2048) * 0.02).bfloat16(), W4A16).weight_scale
    moved = (reference.w4a8_round_scales(scale).float() / scale.float() - 1).abs()
    assert 0.85 < (moved > 0).float().mean() < 0.97
    assert 0.015 < moved.mean() < 0.03


def test_the_effective_weight_is_the_kernels_lookup_table():
    """cutlass pack_scale_fp8 stores e4m3(scale * -8 .. -1) for each group: the product itself is rounded to e4m3."""
    w = (torch.randn(128, 512) * 0.02).bfloat16()
    packed = quantize_weight(w, W4A8)
    group, channel = vllm_scales(packed.weight_scale)
    table = (group.float().unsqueeze(-1) * torch.arange(-8.0, 8.0)).to(torch.float8_e4m3fn).float()  # [N, K/G, 16]
    codes = reference.unpack_int4(packed.weight_packed).long() + 8
    looked_up = table.gather(-1, codes.unflatten(-1, (-1, 128))).flatten(-2)
    assert torch.equal(dequantize_weight(packed, torch.float32), looked_up * channel)
    unrounded = reference.unpack_int4(packed.weight_packed).unflatten(-1, (-1, 128)) * group.float().unsqueeze(-1)
    assert 0.1 < (unrounded.flatten(-2) != looked_up).float().mean() < 0.6


def test_it_costs_little_accuracy():
    w = (torch.randn(256, 1024) * 0.02).bfloat16()
    error = {s: (dequantize_weight(quantize_weight(w, s)).float() - w.float()).norm() / w.float().norm() for s in (W4A8, W4A16)}
    assert error[W4A8] < 1.15 * error[W4A16]
