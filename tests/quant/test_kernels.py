"""Activation quantization against vLLM's arithmetic, and the products of learner and engine."""

import pytest
import torch
import torch.nn.functional as F
from qarl_openrlhf.kernels import dispatch, product, reference
from qarl_openrlhf.quant import QuantScheme, dequantize_weight, quantize_weight

parse = QuantScheme.parse


def activations(m=33, k=256):
    x = torch.randn(m, k)
    x[3] = 0
    x[4] = torch.arange(k) - 127.5  # amax 127.5
    x[5] = (torch.arange(k) % 255 - 127) * 0.5  # multiples of amax / 127: on and between codes
    x[6] *= 1e-9
    x[7, 9] = 3e4
    return x.bfloat16()


def test_int8_activations_as_the_cuda_kernel_computes_them():
    """vllm csrc dynamic_scaled_int8_quant: scale amax/127; code = saturate(rint(x * (127/amax))), 0 for a zero token."""
    x = activations()
    codes, scale = dispatch.act_quant(x, "int8")
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (33, 1)
    for row, c, s in zip(x.float().numpy(), codes.numpy(), scale.numpy(), strict=True):
        amax = abs(row).max()
        inverse = amax.dtype.type(0) if amax == 0 else amax.dtype.type(127) / amax
        assert (c == (row * inverse).round().clip(-128, 127)).all()  # numpy's round is half to even
        assert s == amax / amax.dtype.type(127)


def test_fp8_activations_as_vllm_scaled_fp8_quant():
    """vllm csrc dynamic_per_token_scaled_fp8_quant: scale max(amax/448, 1/(448*512)); code = e4m3(clamp(x / scale))."""
    x = activations()
    codes, scale = dispatch.act_quant(x, "fp8")
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (33, 1)
    expected = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    assert torch.equal(scale, expected) and scale[3] == scale[6] == torch.tensor(1 / (448 * 512))
    assert torch.equal(codes.float(), (x.float() / expected).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert codes[0].float().abs().max() == 448 and codes[3].float().abs().max() == 0
    quant = pytest.importorskip("vllm.model_executor.layers.quantization.input_quant_fp8")
    assert quant._FP8_MIN_SCALING_FACTOR == 1 / (448 * 512)


def test_activations_keep_leading_axes():
    x = activations(12, 64).view(3, 4, 64)
    for fmt in ("int8", "fp8"):
        codes, scale = dispatch.act_quant(x, fmt)
        flat = dispatch.act_quant(x.view(12, 64), fmt)
        assert codes.shape == x.shape and scale.shape == (3, 4, 1)
        assert torch.equal(codes.view(12, 64).float(), flat[0].float()) and torch.equal(scale.view(12, 1), flat[1])


@pytest.fixture(params=["slow bf16", "fast bf16"])
def cpu_kind(request, monkeypatch):
    monkeypatch.setattr(product, "cpu_multiplies_bf16", lambda: request.param == "fast bf16")
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_is_one_rounding_of_the_exact_product(cpu_kind, dtype):
    x, w, b = torch.randn(5, 7, 192).to(dtype), torch.randn(48, 192).to(dtype), torch.randn(48).to(dtype)
    y = dispatch.linear(x, w, b)
    exact = x.double() @ w.double().t() + b.double()
    assert y.dtype == dtype and y.shape == (5, 7, 48)
    if dtype == torch.bfloat16 and cpu_kind == "fast bf16":
        # PyTorch's own product, whatever its accuracy on a CPU that does not really have BF16 instructions. Not by its
        # public name, which DeepSpeed's zero.Init replaces for the rest of a process.
        assert torch.equal(y, torch._C._nn.linear(x, w, b))
        return
    if dtype == torch.bfloat16:
        # Correctly rounded but for float32 accumulation error beside a rounding boundary.
        assert (y != exact.bfloat16()).float().mean() < 0.01
    torch.testing.assert_close(y.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_with_and_without_grad_and_from_the_kept_copy(cpu_kind, dtype):
    x, b = torch.randn(64, 192).to(dtype), torch.randn(48).to(dtype)
    w = torch.nn.Parameter(torch.randn(48, 192).to(dtype))
    with torch.no_grad():
        y = dispatch.linear(x, w, b)
        from_copy = dispatch.linear(x, product.operand(w, dtype), b)
    assert torch.equal(dispatch.linear(x.requires_grad_(), w, b), y) and torch.equal(from_copy, y)
    for name in ("w4a16:g64", "w8a8", "fp8"):
        scheme = parse(name)
        packed = quantize_weight(w, scheme)
        made = dispatch.quantized_linear(x, packed, None, b, scheme)
        kept = dispatch.quantized_linear(x, packed, dispatch.weight_operand(packed, dtype), b, scheme)
        assert torch.equal(made, kept) and made.dtype == dtype


def test_plain_gradients(cpu_kind):
    x, w, b = (torch.randn(s).bfloat16().requires_grad_() for s in ((3, 16, 96), (40, 96), (40,)))
    dy = torch.randn(3, 16, 40).bfloat16()
    dispatch.linear(x, w, b).backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    F.linear(*exact).backward(dy.double())
    for got, want in zip((x, w, b), exact, strict=True):
        assert got.grad.dtype == torch.bfloat16
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=2**-7, atol=2e-2)


def test_no_gradient_is_computed_for_what_needs_none():
    x = torch.randn(4, 32).bfloat16()
    w = torch.nn.Parameter(torch.randn(8, 32).bfloat16())
    dispatch.linear(x, w).sum().backward()
    assert x.grad is None and w.grad is not None


@pytest.mark.parametrize("k", [64, 1024, 1032, 3000, 9000])
def test_integer_products_are_exact(k):
    x = torch.randint(-127, 128, (6, k), dtype=torch.int8)
    w = torch.randint(-128, 128, (10, k), dtype=torch.int8)
    x[0], w[0] = 127, -128  # the largest sum there is
    x[1:4] = 127 - x[1:4].remainder(2)  # large sums whose low bits are lost if they are added in float32
    w[1:4] = 127 - w[1:4].remainder(2)
    exact = x.long() @ w.long().t()
    assert torch.equal(product.integer_product(x, w).double(), exact.float().double())
    assert torch.equal(product.integer_product(x, w.float()), exact.float())


@pytest.mark.parametrize("name", ["w4a16:g64", "w8a8", "fp8", "w4a8"])
def test_low_bit_forward_equals_its_formula(name):
    """In float64: x_scale * w_scale * (x codes @ w codes) + bias; W4A8 adds the bias after rounding, as its kernel does."""
    scheme = parse(name)
    x, w, b = activations(32, 256), torch.randn(128, 256).bfloat16() * 0.05, torch.randn(128).bfloat16()
    packed = quantize_weight(w, scheme)
    y = dispatch.quantized_linear(x, packed, None, b, scheme)
    if scheme.activation_format == "bf16":
        x_dq = x.double()
    else:
        codes, scale = dispatch.act_quant(x, scheme.activation_format)
        x_dq = codes.double() * scale.double()
    w_dq = dequantize_weight(packed, torch.bfloat16 if name.startswith("w4a16") else torch.float32)
    exact = x_dq @ w_dq.double().t()
    exact = exact.bfloat16() + b if name == "w4a8" else (exact + b.double()).bfloat16()
    assert y.dtype == torch.bfloat16
    assert (y != exact).float().mean() < 0.01
    torch.testing.assert_close(y, exact, rtol=2**-7, atol=2**-10)


def test_int8_forward_is_exact_up_to_its_epilogue():
    x, w = activations(8, 2048), torch.randn(16, 2048).bfloat16()
    packed = quantize_weight(w, parse("w8a8"))
    codes, scale = reference.quantize_act_int8(x)
    total = (codes.long() @ packed.weight.long().t()).float()
    expected = (scale * (packed.weight_scale.float().view(1, -1) * total)).bfloat16()
    assert torch.equal(dispatch.quantized_linear(x, packed, None, None, parse("w8a8")), expected)
