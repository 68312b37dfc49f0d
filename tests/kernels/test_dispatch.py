"""Choice of kernels, on any machine."""

import pytest
import torch

from qarl_openrlhf import config
from qarl_openrlhf.kernels import dispatch, grouped, reference
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


def test_a_scale_is_converted_once_and_again_when_it_is_written_to():
    pytest.importorskip("triton")
    from qarl_openrlhf.kernels import cuda

    scale = torch.rand(8, 1).bfloat16()
    first = cuda._float_scale(scale)
    assert first.dtype == torch.float32 and cuda._float_scale(scale) is first
    scale.mul_(2)
    assert torch.equal(cuda._float_scale(scale), scale.float())
    assert cuda._float_scale(scale) is cuda._float_scale(scale)
    with torch.inference_mode():
        other = scale * 1
        for _ in range(2):
            assert torch.equal(cuda._float_scale(other), other.float())
            other.mul_(2)
    key = id(scale)
    del scale
    assert key not in cuda._float_scales


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


class Library:
    """PyTorch's products on a card of this compute capability, by the reference, and refused where PyTorch refuses them."""

    def __init__(self, capability: tuple[int, int]):
        self.capability = capability
        self.called = []

    def scaled_mm(self, x, w, x_scale, w_scale, *, bias, out_dtype, use_fast_accum):
        assert self.capability >= (8, 9), "torch._scaled_mm needs compute capability 8.9"
        return self.product("_scaled_mm", x, w, x_scale, w_scale)

    def scaled_grouped_mm(self, x, w, x_scale, w_scale, *, offs, out_dtype, use_fast_accum):
        assert self.capability == (9, 0), "torch._scaled_grouped_mm with row and channel scales is for compute capability 9.0"
        return self.experts("_scaled_grouped_mm", x, w.transpose(-2, -1), x_scale[:, None], w_scale[..., None], offs)

    def grouped_w8a8(self, x, x_scale, w, w_scale, ends):
        return self.experts("grouped_w8a8", x, w, x_scale, w_scale, ends)

    def product(self, name, x, w, x_scale, w_scale):
        self.called.append(name)
        return (x_scale * (w_scale * (x.float() @ w.float()))).bfloat16()

    def experts(self, name, x, w, x_scale, w_scale, ends):
        edges = [0, *ends.tolist()]
        assert x_scale.dtype == w_scale.dtype == torch.float32
        parts = [self.product(name, x[a:b], w[e].T, x_scale[a:b], w_scale[e].T) for e, (a, b) in enumerate(zip(edges, edges[1:]))]
        return torch.cat(parts)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8", "w4a8"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_every_scheme_that_a_card_is_allowed_has_a_product_there(monkeypatch, capability, name, experts):
    pytest.importorskip("triton")
    from qarl_openrlhf.kernels import cuda

    scheme, library = QuantScheme.parse(name), Library(capability)
    try:
        config.check_card(scheme, capability, "a card")
    except config.ConfigError:
        assert (name, capability) == ("fp8", (8, 0)) or name == "w4a8" and capability != (9, 0)
        return
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for function in ("_scaled_mm", "_scaled_grouped_mm"):
        monkeypatch.setattr(torch, function, getattr(library, function[1:]))
    monkeypatch.setattr(cuda, "INTERPRETED", False)
    monkeypatch.setattr(cuda, "grouped_w8a8", library.grouped_w8a8)
    monkeypatch.setattr(cuda, "w8a8_gemm", lambda x, xs, w, ws, bias, late: library.product("w8a8_gemm", x, w.T, xs, ws.T))
    monkeypatch.setattr(cuda, "act_quant", lambda x, fp8: dispatch.act_quant(x, "fp8" if fp8 else "int8"))
    monkeypatch.setattr(cuda, "w4a8_operand", reference.w4a8_codes)
    monkeypatch.setattr(cuda, "choices", {})
    w, x, ends = torch.randn(3, 128, 128).bfloat16() * 0.02, torch.randn(9, 128).bfloat16(), torch.tensor([4, 4, 9], dtype=torch.int32)
    packed = quantize_weight(w if experts else w[0], scheme)
    copy = dispatch.weight_operand(packed, torch.bfloat16).bfloat16() if name == "w4a16" else None
    if experts:
        y, expected = cuda.grouped_linear(x, packed, copy, ends), grouped.forward(x, packed, None, ends)
    else:
        y, expected = cuda.quantized_linear(x, packed, copy, None, own=False), dispatch.quantized_linear(x, packed, None, None, scheme)
    assert torch.allclose(y.float(), expected.float(), rtol=2**-6, atol=1e-3)
    if experts and name != "w4a16":
        kernel = "_scaled_grouped_mm" if capability == (9, 0) and name != "w8a8" else "grouped_w8a8"
        assert set(library.called) == {kernel} == {chosen for chosen, _ in cuda.choices.values()}


class OnCard(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_experts_without_rows_get_no_gradient_whatever_the_product_leaves_there(monkeypatch, capability):
    """pytorch issue 172439: on Blackwell the matrices of empty groups are memory as it was."""
    loads, wrong = [0, 5, 0, 0, 3, 0], float("nan")
    ends = torch.tensor(loads).cumsum(0).to(torch.int32)

    def product(a, b, *, offs):
        edges = [0, *offs.tolist()]
        parts = [a[:, i:j] @ b[i:j] if j > i else torch.full((a.shape[0], b.shape[1]), wrong) for i, j in zip(edges, edges[1:])]
        return torch.stack([part.bfloat16() for part in parts])

    monkeypatch.setattr(torch, "_grouped_mm", product)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    dy, x = (torch.randn(8, size).bfloat16().as_subclass(OnCard) for size in (32, 16))
    _, dw = grouped.backward(dy, x, None, ends, (False, True), torch.bfloat16)
    for e, load in enumerate(loads):
        rows = slice(int(ends[e]) - load, int(ends[e]))
        assert torch.equal(dw[e], (dy[rows].T @ x[rows]) if load else torch.zeros(32, 16))
