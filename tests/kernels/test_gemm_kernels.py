"""w8a8_gemm and w4a16_gemm: INT8 bit-equal with the reference, the others close to float64."""

import pytest
import torch

triton = pytest.importorskip("triton")

from qarl_openrlhf.kernels import dispatch, grouped_gemm, reference, w4a16_gemm, w8a8_gemm  # noqa: E402
from qarl_openrlhf.quant import QuantScheme, dequantize_weight, quantize_weight  # noqa: E402


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """||y - exact|| / ||exact||; NaN if y has one."""
    return ((y.double().cpu() - exact).norm() / exact.norm()).item()


def eight_bit(m, n, k, name, device):
    x, w = torch.randn(m, k).bfloat16(), (torch.randn(n, k) * 0.02).bfloat16()
    packed = quantize_weight(w, QuantScheme.parse(name))
    quantize = reference.quantize_act_int8 if name == "w8a8" else reference.quantize_act_fp8
    codes, scale = quantize(x)
    exact = (codes.double() * scale.double()) @ (packed.weight.double() * packed.weight_scale.double()).T
    arguments = [t.to(device) for t in (codes, scale, packed.weight, packed.weight_scale.float())]
    return x, packed, arguments, exact


def run(arguments, bias=None, late_bias=False):
    poison = [torch.full((1 << 20,), 255, dtype=torch.uint8, device=arguments[0].device) for _ in range(4)]
    del poison
    return w8a8_gemm.w8a8_gemm(*arguments, bias, late_bias)


@pytest.mark.parametrize("m, n, k", [(1, 48, 64), (77, 130, 192), (130, 257, 576)])
def test_int8_equals_the_reference_bit_for_bit(m, n, k, device):
    x, packed, arguments, _ = eight_bit(m, n, k, "w8a8", device)
    bias = torch.randn(n).bfloat16()
    for b in (None, bias):
        expected = dispatch.quantized_linear(x, packed, None, b, packed.scheme)
        assert torch.equal(run(arguments, None if b is None else b.to(device)).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(1, 16, 64), (77, 130, 192), (130, 257, 576), (1000, 1536, 8960), (4096, 576, 1536)])
def test_fp8_against_float64(m, n, k, device):
    _, _, arguments, exact = eight_bit(m, n, k, "fp8", device)
    assert error(run(arguments), exact) < 3e-3
    bias = torch.randn(n).bfloat16()
    assert error(run(arguments, bias.to(device)), exact + bias.double()) < 3e-3


def test_a_late_bias_is_added_after_rounding(device):
    _, packed, arguments, _ = eight_bit(5, 48, 64, "w8a8", device)
    bias = torch.randn(48).bfloat16()
    y = run(arguments).cpu()
    assert torch.equal(run(arguments, bias.to(device), True).cpu(), y + bias)


@pytest.mark.parametrize("loads", [[5, 0, 70, 3], [0, 0, 1]])
@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_experts_against_float64(name, loads, device):
    """In e4m3, too, which cards other than Hopper need."""
    x, w = torch.randn(sum(loads), 64).bfloat16(), (torch.randn(len(loads), 48, 64) * 0.02).bfloat16()
    packed, ends = quantize_weight(w, QuantScheme.parse(name)), torch.tensor(loads).cumsum(0).to(torch.int32)
    codes, scale = {"w8a8": reference.quantize_act_int8, "fp8": reference.quantize_act_fp8}[name](x)
    w_dq = packed.weight.double() * packed.weight_scale.double()
    exact = torch.cat([rows.double() @ w_dq[e].T for e, rows in enumerate((codes.double() * scale.double()).split(loads))])
    on = [t.to(device) for t in (codes, scale, packed.weight, packed.weight_scale.float(), ends)]
    assert error(grouped_gemm.grouped_w8a8(*on), exact) < 3e-3


def test_empty_and_odd_shapes(device):
    _, _, (x, x_scale, w, w_scale), _ = eight_bit(4, 48, 64, "w8a8", device)
    assert run([x[:0], x_scale[:0], w, w_scale]).shape == (0, 48)
    with pytest.raises(ValueError, match="multiples of 16"):
        run([x[:, :40].contiguous(), x_scale, w[:, :40].contiguous(), w_scale])


@pytest.mark.parametrize("name", ["w4a16", "w4a16:g64", "w4a16:g32"])
@pytest.mark.parametrize("m, n, k", [(1, 48, 256), (16, 96, 512), (21, 130, 384)])
def test_w4a16_against_float64(m, n, k, name, device):
    x, w, bias = torch.randn(m, k).bfloat16(), (torch.randn(n, k) * 0.02).bfloat16(), torch.randn(n).bfloat16()
    packed = quantize_weight(w, QuantScheme.parse(name))
    exact = x.double() @ dequantize_weight(packed).double().T
    on = [t.to(device) for t in (x, packed.weight_packed, packed.weight_scale, bias)]
    assert error(w4a16_gemm.w4a16_gemm(*on[:3], None), exact) < 3e-3
    assert error(w4a16_gemm.w4a16_gemm(*on), exact + bias.double()) < 3e-3
    assert w4a16_gemm.w4a16_gemm(on[0][:0], *on[1:]).shape == (0, n)


@pytest.mark.parametrize("split", [1, 2, 4])
def test_w4a16_with_k_split_over_programs(split, device, monkeypatch):
    monkeypatch.setattr(w4a16_gemm, "CONFIGS", [w4a16_gemm.Config((64, 16, split), 4, 3)])
    x, w = torch.randn(3, 640).bfloat16(), (torch.randn(70, 640) * 0.02).bfloat16()
    packed = quantize_weight(w, QuantScheme.parse("w4a16"))
    exact = x.double() @ dequantize_weight(packed).double().T
    on = [t.to(device) for t in (x, packed.weight_packed, packed.weight_scale)]
    first = w4a16_gemm.w4a16_gemm(*on, None)
    assert error(first, exact) < 3e-3
    for _ in range(1 if device == "cpu" else 20):
        assert torch.equal(w4a16_gemm.w4a16_gemm(*on, None), first)
    assert not any(counters.any() for counters in w4a16_gemm._arrivals.values())


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(1, 576, 576), (16, 17920, 1536), (64, 4096, 12288), (33, 3584, 18944)])
def test_w4a16_at_real_shapes(m, n, k, device):
    test_w4a16_against_float64(m, n, k, "w4a16:g64", device)


def test_w4a16_refuses_many_rows(device):
    x, w = torch.randn(65, 128).bfloat16(), torch.randn(16, 128).bfloat16()
    packed = quantize_weight(w, QuantScheme.parse("w4a16"))
    with pytest.raises(ValueError, match="at most 64 rows"):
        w4a16_gemm.w4a16_gemm(x.to(device), packed.weight_packed.to(device), packed.weight_scale.to(device), None)
