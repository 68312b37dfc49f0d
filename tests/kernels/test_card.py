"""The low-bit forward and backward on a CUDA card, through dispatch and QuantLinear."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from qarl_openrlhf.kernels import dispatch, grouped  # noqa: E402
from qarl_openrlhf.quant import QuantError, QuantScheme, dequantize_weight, quantize_weight  # noqa: E402
from qarl_openrlhf.quant.cache import StepWeight  # noqa: E402
from qarl_openrlhf.quant.convert import convert_model, published_tensors  # noqa: E402

SCHEMES = ["w4a16", "w4a16:g32", "w8a8", "fp8", "w4a8"]


@pytest.fixture(autouse=True)
def auto_kernel():
    dispatch.set_kernel("auto")
    yield
    dispatch.set_kernel("auto")


def error(y, exact):
    return ((y.double() - exact.double()).norm() / exact.double().norm()).item()


def bits(t):
    return t.cpu().contiguous().view(torch.uint8)


def exact_forward(x, packed, bias):
    """float64, of the very codes that the kernel multiplies."""
    if packed.scheme.activation_format == "bf16":
        y = x.double() @ dequantize_weight(packed).double().T
    else:
        codes, scale = dispatch.act_quant(x, packed.scheme.activation_format)
        y = (codes.double() * scale.double()) @ (
            packed.weight.double() * packed.weight_scale.double() if packed.weight is not None else w4a8(packed)
        ).T
    return y if bias is None else y + bias.double()


def w4a8(packed):
    from qarl_openrlhf.kernels import reference

    codes, channel = reference.w4a8_codes(packed.weight_packed.cpu(), packed.weight_scale.cpu())
    return (codes.double() * channel.double()).cuda()


@pytest.mark.parametrize("kernel", ["auto", "triton", "torch"])
@pytest.mark.parametrize("m, n, k", [(1, 128, 256), (77, 640, 576), (300, 1536, 1536), (64, 136, 1024)])
@pytest.mark.parametrize("name", SCHEMES)
def test_forward_against_float64(name, m, n, k, kernel):
    scheme = QuantScheme.parse(name)
    if scheme.group_size and k % scheme.group_size:
        k = 512
    if name == "w4a8":
        n = 640
    x, bias = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
    packed = quantize_weight((torch.randn(n, k, device="cuda") * 0.02).bfloat16(), scheme)
    dispatch.set_kernel(kernel)
    operand = dispatch.weight_operand(packed, torch.bfloat16)
    for b in (None, bias):
        for copy in (None, operand):
            y = dispatch.quantized_linear(x, packed, copy, b, scheme)
            assert error(y, exact_forward(x, packed, b)) < 4e-3
    y = dispatch.quantized_linear(x.view(1, m, k), packed, None, None, scheme)
    assert y.shape == (1, m, n)
    assert dispatch.quantized_linear(x[:0], packed, None, bias, scheme).shape == (0, n)
    wide = torch.randn(m, 2 * k, device="cuda").bfloat16()[:, k:]  # rows with a stride
    assert error(dispatch.quantized_linear(wide, packed, None, None, scheme), exact_forward(wide, packed, None)) < 4e-3


@pytest.mark.parametrize("name", SCHEMES)
def test_the_card_quantizes_as_the_cpu(name):
    scheme, w = QuantScheme.parse(name), (torch.randn(256, 512) * 0.02).bfloat16()
    here, there = quantize_weight(w, scheme), quantize_weight(w.cuda(), scheme)
    for key, tensor in here.tensors().items():
        assert torch.equal(bits(tensor), bits(there.tensors()[key])), key
    assert torch.equal(bits(dequantize_weight(here)), bits(dequantize_weight(there)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({"q_proj": nn.Linear(256, 512), "k_proj": nn.Linear(256, 128), "down_proj": nn.Linear(512, 256)})
        self.layers = nn.ModuleList([layer])

    def forward(self, x):
        layer = self.layers[0]
        q, k = layer["q_proj"](x), layer["k_proj"](x)
        return layer["down_proj"](q) + k.sum(-1, keepdim=True)


@pytest.mark.parametrize("cache", ["packed", "dequant", "none"])
@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_are_those_of_the_dequantized_model(name, cache):
    """dX and dW of every layer against autograd on a model that holds the effective weights, at the same activations."""
    torch.manual_seed(1)
    model = Model().bfloat16().cuda()
    scheme = QuantScheme.parse(name)
    convert_model(model, scheme, cache=cache)
    for module in model.layers[0].values():
        module.weight.data = (torch.randn_like(module.weight) * 0.02).bfloat16()
        x = torch.randn(96, module.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(96, module.out_features, device="cuda", dtype=torch.bfloat16)
        module(x).backward(dy)
        w = dequantize_weight(quantize_weight(module.weight.detach(), scheme)).double().requires_grad_()
        reference_x = x.detach().double().requires_grad_()
        (reference_x @ w.T + module.bias.detach().double()).backward(dy.double())
        assert error(x.grad, reference_x.grad) < 4e-3
        assert error(module.weight.grad, w.grad) < 4e-3
        assert error(module.bias.grad, dy.double().sum(0)) < 4e-3
        model.zero_grad()


@pytest.mark.parametrize("name, kernels", [
    ("w4a16", ["quantize_int4", "dequantize_int4"]),
    ("w8a8", ["quantize_row8", "dequantize_row8", "act_quant", "w8a8_gemm"]),
    ("fp8", ["quantize_row8", "dequantize_row8", "act_quant", "w8a8_gemm"]),
    ("w4a8", ["quantize_w4a8", "w4a8_operand", "dequantize_w4a8", "act_quant", "w8a8_gemm"]),
])  # fmt: skip
def test_a_training_step_counts_each_kernel(name, kernels):
    """--quant.kernel triton: every kernel of the scheme runs for every layer."""
    dispatch.set_kernel("triton")
    model = Model().bfloat16().cuda()
    convert_model(model, QuantScheme.parse(name), cache="packed")
    before = dispatch.kernel_calls()
    x = torch.randn(96, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    after = dispatch.kernel_calls()
    count = {kernel: after[kernel] - before.get(kernel, 0) for kernel in kernels}
    assert count.pop("act_quant", 2) == 2, "q_proj and k_proj share the quantization of x"
    assert all(number == 3 or kernel == "dequantize_int4" and number == 6 for kernel, number in count.items()), count
    assert name in dispatch.kernel_choices() and "[512, 256]" in dispatch.kernel_choices()


def test_a_written_activation_is_quantized_again():
    scheme = QuantScheme.parse("fp8")
    packed = quantize_weight(torch.randn(64, 128, device="cuda").bfloat16(), scheme)
    x = torch.randn(32, 128, device="cuda").bfloat16()
    first = dispatch.quantized_linear(x, packed, None, None, scheme)
    x.mul_(2)
    assert torch.equal(dispatch.quantized_linear(x, packed, None, None, scheme), first * 2)


def test_a_bad_weight_is_found_at_the_push():
    model = Model().bfloat16().cuda()
    scheme = QuantScheme.parse("w4a16")
    convert_model(model, scheme)
    model.layers[0]["k_proj"].weight.data[3, 5] = float("nan")
    model(torch.randn(4, 256, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(QuantError, match="k_proj: a weight is NaN"):
        list(published_tensors(model, scheme))


def test_ops_have_fakes_and_survive_compile():
    from qarl_openrlhf.kernels import act_quant, quantize_pack, w8a8_gemm  # noqa: F401

    w, x = torch.randn(64, 128, device="cuda").bfloat16(), torch.randn(32, 128, device="cuda").bfloat16()
    quick = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.qarl.quantize_int4.default, (w, 128, True), test_utils=quick)
    torch.library.opcheck(torch.ops.qarl.quantize_row8.default, (w, True, False), test_utils=quick)
    torch.library.opcheck(torch.ops.qarl.act_quant.default, (x, True), test_utils=quick)
    codes, x_scale = torch.ops.qarl.act_quant(x, False)
    w_codes, w_scale, _ = torch.ops.qarl.quantize_row8(w, False, False)
    arguments = (codes, x_scale, w_codes, w_scale.float(), None, False)
    torch.library.opcheck(torch.ops.qarl.w8a8_gemm.default, arguments, test_utils=quick)
    packed, scales, _ = torch.ops.qarl.quantize_int4(w, 128, False)
    torch.library.opcheck(torch.ops.qarl.w4a16_gemm.default, (x, packed, scales, None), test_utils=quick)
    torch.library.opcheck(torch.ops.qarl.dequantize_int4.default, (packed, scales), test_utils=quick)


def test_compile_and_checkpointing_see_ordinary_ops():
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scale = lambda t: torch.ops.qarl.act_quant(t, True)[1] * 2  # noqa: E731
    assert torch.equal(torch.compile(scale, fullgraph=True, backend="aot_eager")(x.detach()), scale(x.detach()))
    model = Model().bfloat16().cuda()
    convert_model(model, QuantScheme.parse("fp8"))
    gradients = []
    for run in (model, lambda t: checkpoint(model, t, use_reentrant=False)):
        model.zero_grad()
        x.grad = None
        run(x).float().square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("loads", [[5, 0, 130, 64], [0, 0, 0, 7], [512, 512, 512, 512]])
@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8", "w4a8"])
def test_grouped_products(name, loads):
    """Forward and backward of experts against the products expert by expert, in float64."""
    scheme, e, n, k = QuantScheme.parse(name), len(loads), 256, 384
    ends = torch.tensor(loads).cumsum(0).to(torch.int32).cuda()
    x = torch.randn(sum(loads), k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(e, n, k, device="cuda") * 0.02).bfloat16().requires_grad_()
    packed = quantize_weight(weight.detach(), scheme)
    for keep in (False, True):
        step = StepWeight(packed, 0, keep_copies=keep)
        y = grouped.GroupedStraightThrough.apply(x, weight, step, ends)
        dy = torch.randn_like(y)
        x.grad = weight.grad = None
        y.backward(dy)
        begin = 0
        for i, load in enumerate(loads):
            rows = slice(begin, begin + load)
            w = dequantize_weight(packed)[i].double()
            if load:
                assert error(y[rows], exact_forward(x[rows].detach(), grouped.expert(packed, i), None)) < 4e-3
                assert error(x.grad[rows], dy[rows].double() @ w) < 4e-3
                assert error(weight.grad[i], dy[rows].double().T @ x[rows].detach().double()) < 4e-3
            else:
                assert not weight.grad[i].any()
            begin += load
