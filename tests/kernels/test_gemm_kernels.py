"""w8a8_gemm and w4a16_gemm: INT8 bit-equal with the reference, the others close to float64."""

import pytest
import torch

triton = pytest.importorskip("triton")

from qarl_openrlhf.kernels import dispatch, reference, w8a8_gemm  # noqa: E402
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


def test_empty_and_odd_shapes(device):
    _, _, (x, x_scale, w, w_scale), _ = eight_bit(4, 48, 64, "w8a8", device)
    assert run([x[:0], x_scale[:0], w, w_scale]).shape == (0, 48)
    with pytest.raises(ValueError, match="multiples of 16"):
        run([x[:, :40].contiguous(), x_scale, w[:, :40].contiguous(), w_scale])
