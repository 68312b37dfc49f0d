"""Choice of kernels, on any machine."""

import pytest
import torch

from qarl_openrlhf.kernels import dispatch, grouped
from qarl_openrlhf.quant import QuantError, QuantScheme, dequantize_weight, quantize_weight
from qarl_openrlhf.quant.cache import StepWeight
from qarl_openrlhf.quant.packing import require_finite


@pytest.fixture(autouse=True)
def auto_kernel():
    yield
    dispatch.set_kernel("auto")


def test_an_unknown_kernel_is_refused_by_name():
    with pytest.raises(ValueError, match="--quant.kernel cutlass .* auto, triton, torch"):
        dispatch.set_kernel("cutlass")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a card")
def test_triton_without_a_card_is_refused():
    pytest.importorskip("triton")
    dispatch.set_kernel("triton")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        quantize_weight(torch.randn(16, 128).bfloat16(), QuantScheme.parse("w4a16"))


def test_cards_without_fp8_are_refused_by_name():
    pytest.importorskip("triton")
    from qarl_openrlhf.kernels import cuda

    for name in ("fp8", "w4a8"):
        with pytest.raises(QuantError, match=f"{name} needs FP8 .* NVIDIA A100 has 8.0: use w8a8 or w4a16"):
            cuda.require(name, (8, 0), "NVIDIA A100")
        cuda.require(name, (8, 9), "NVIDIA L4")
        cuda.require(name, (9, 0), "NVIDIA H100")
    cuda.require("w8a8", (8, 0), "NVIDIA A100")


def test_finite_check_names_the_layers():
    good, bad = torch.ones(4, 2).bfloat16(), torch.tensor([[1.0, float("nan")]]).bfloat16()
    require_finite({})
    require_finite({"a": good})
    with pytest.raises(QuantError, match="^b, d: a weight is NaN"):
        require_finite({"a": good, "b": bad, "c": good, "d": torch.tensor([[float("inf")]])})


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "fp8"])
def test_grouped_reference(name):
    """Experts one by one, forward and backward, with an expert that got no rows."""
    scheme, loads = QuantScheme.parse(name), [3, 0, 5]
    ends = torch.tensor(loads).cumsum(0).to(torch.int32)
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    weight = (torch.randn(3, 32, 64) * 0.02).bfloat16().requires_grad_()
    packed = quantize_weight(weight.detach(), scheme)
    y = grouped.GroupedStraightThrough.apply(x, weight, StepWeight(packed, 0, keep_copies=True), ends)
    dy = torch.randn_like(y)
    y.backward(dy)
    w = dequantize_weight(packed)
    for e, rows in ((0, slice(0, 3)), (2, slice(3, 8))):
        alone = quantize_weight(weight[e].detach(), scheme)
        assert torch.equal(y[rows], dispatch.quantized_linear(x[rows].detach(), alone, None, None, scheme))
        assert torch.allclose(x.grad[rows].float(), (dy[rows].float() @ w[e].float()), rtol=1e-2, atol=1e-3)
        assert torch.allclose(weight.grad[e].float(), dy[rows].float().T @ x[rows].detach().float(), rtol=1e-2, atol=1e-2)
    assert not weight.grad[1].any()


@pytest.mark.parametrize("scheme", ["w4a16:g32", "w8a8", None])
def test_products_are_pytorchs_own_whatever_replaces_the_function(monkeypatch, scheme):
    """DeepSpeed's zero.Init puts a product that rounds before it adds the bias in the place of functional.linear."""
    torch.manual_seed(0)
    x, w, bias = torch.randn(5, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()

    def run():
        if scheme is None:
            return dispatch.linear(x, w, bias)
        parsed = QuantScheme.parse(scheme)
        return dispatch.quantized_linear(x, quantize_weight(w, parsed), None, bias, parsed)

    expected = run()
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: torch.zeros(5, 32))
    assert torch.equal(run(), expected)
