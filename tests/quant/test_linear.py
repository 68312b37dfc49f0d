"""QuantLinear in whole models: forward, straight-through gradients, caching."""

import copy
import io

import pytest
import torch
from qarl_openrlhf.kernels import dispatch, product
from qarl_openrlhf.quant import QuantError, QuantScheme, dequantize_weight, quantize_weight
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.linear import QuantLinear, quantized_forward
from tests.tiny_models import FAMILIES, LINEARS, loss_of, tiny, tokens
from torch import nn

parse = QuantScheme.parse
MODES = ("packed", "dequant", "none")


def quantized_layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear) and m.scheme}


def dequantized_copy(model, scheme):
    """The same model with the effective weights written into plain nn.Linear layers (through the same CPU product)."""
    plain = copy.deepcopy(model)
    convert_model(plain, parse("bf16"))
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, nn.Linear) and ".layers." in name:
                module.weight.copy_(dequantize_weight(quantize_weight(module.weight, scheme), module.weight.dtype))
    return plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_w4a16_is_the_dequantized_model_forward_and_backward(family, dtype):
    scheme = parse("w4a16:g32")
    model = tiny(family, dtype)
    reference = dequantized_copy(model, scheme)
    convert_model(model, scheme)
    loss, expected = loss_of(model), loss_of(reference)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert p.grad is not None and p.grad.dtype == dtype, name
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("name", ["w8a8", "fp8", "w4a8"])
def test_8_bit_activations_have_the_straight_through_gradients(name):
    scheme = parse(name)
    torch.manual_seed(0)
    linear = nn.Linear(256, 128).bfloat16()
    w_dq = dequantize_weight(quantize_weight(linear.weight, scheme)).double()
    convert_model(model := nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": linear})])}), scheme)
    assert isinstance(model["layers"][0]["up"], QuantLinear)
    x = torch.randn(2, 9, 256).bfloat16().requires_grad_()
    dy = torch.randn(2, 9, 128).bfloat16()
    y = linear(x)
    packed = linear.packed()
    assert torch.equal(y, dispatch.quantized_linear(x, packed, None, linear.bias, scheme))
    y.backward(dy)
    rows, drows = x.detach().double().view(-1, 256), dy.double().view(-1, 128)
    torch.testing.assert_close(x.grad.double().view(-1, 256), drows @ w_dq, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(linear.weight.grad.double(), drows.t() @ rows, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(linear.bias.grad.double(), drows.sum(0), rtol=2**-7, atol=1e-2)
    # Really low-bit: the plain product of the dequantized weight is something else.
    assert not torch.equal(y, product.forward(x.detach(), w_dq.bfloat16(), linear.bias.detach()))


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "fp8", "w4a8"])
def test_low_bit_models_stay_close_to_bf16(name):
    model = tiny(num_key_value_heads=4)
    with torch.no_grad():
        before = model(input_ids=tokens()).logits.float().log_softmax(-1)
        convert_model(model, parse(name))
        after = model(input_ids=tokens()).logits.float().log_softmax(-1)
    gap = (before - after).abs().mean()
    assert 1e-4 < gap < {"w4a16:g32": 0.5, "w8a8": 0.05, "fp8": 0.2, "w4a8": 0.7}[name], gap


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "fp8"])
def test_cache_modes_give_the_same_bits(name):
    results = {}
    for mode in MODES:
        model = tiny("qwen2")
        convert_model(model, parse(name), cache=mode)
        loss = loss_of(model)
        loss.backward()
        packed = {n: m.packed().tensors() for n, m in quantized_layers(model).items()}
        results[mode] = (loss, [p.grad for p in model.parameters()], packed)
    for mode in MODES[1:]:
        assert torch.equal(results[mode][0], results["packed"][0])
        assert all(torch.equal(a, b) for a, b in zip(results[mode][1], results["packed"][1], strict=True))
        for layer, tensors in results[mode][2].items():
            for key, tensor in tensors.items():
                assert torch.equal(tensor.view(torch.uint8), results["packed"][2][layer][key].view(torch.uint8))


def test_logits_are_bitwise_the_same_with_and_without_grad_and_checkpointing():
    for name in ("w4a16:g32", "w8a8", "bf16", "w4a16:g32:rollout"):
        model = tiny("qwen3")
        convert_model(model, parse(name))
        model.train()
        with torch.no_grad():
            old = model(input_ids=tokens()).logits
        new = model(input_ids=tokens()).logits
        model.gradient_checkpointing_enable()
        assert new.requires_grad and torch.equal(old, new)
        assert torch.equal(old, model(input_ids=tokens(), use_cache=False).logits), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_quantizes_once_and_gives_the_same_gradients(reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = tiny("qwen2")
        convert_model(model, parse("w4a16:g32"))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        loss_of(model).backward()
        assert model.quant_cache.stats.quantize_calls == LINEARS
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_quantized_once_a_step_whatever_the_micro_batches():
    model = tiny()
    convert_model(model, parse("w4a16:g32"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    stats = model.quant_cache.stats
    for step in range(1, 4):
        for _ in range(3):
            loss_of(model).backward()
        list(m.packed() for m in quantized_layers(model).values())
        assert stats.quantize_calls == step * LINEARS
        optimizer.step()  # autograd sees this write: the cache needs no telling
        optimizer.zero_grad()
    none = tiny()
    convert_model(none, parse("w4a16:g32"), cache="none")
    for _ in range(2):
        loss_of(none).backward()
    assert none.quant_cache.stats.quantize_calls == 2 * LINEARS and none.quant_cache.nbytes == 0


def test_writes_to_the_parameter_are_noticed():
    model = tiny()
    convert_model(model, parse("w4a16:g32"))
    layer = model.model.layers[0].mlp.up_proj
    first = layer.packed()
    assert layer.packed() is first and layer.is_packed()
    with torch.no_grad():
        layer.weight[0, 0] = 5
    assert not layer.is_packed() and layer.packed() is not first
    second = layer.packed()
    model.load_state_dict(model.state_dict())
    assert layer.packed() is not second
    third = layer.packed()
    layer.weight.data[0, 0] = -5  # what DeepSpeed does: invisible ...
    assert layer.packed() is third
    model.quant_cache.invalidate()  # ... so it must be said
    assert layer.packed().changed_codes(third)[0] > 0


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),  # writes where autograd does not look
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_of_any_pytorch_optimizer_is_noticed(name):
    model, other = tiny(), tiny()
    for one in (model, other):
        convert_model(one, parse("w4a16:g32"))
    held = {name: layer.packed() for name, layer in quantized_layers(other).items()}
    frozen = "model.layers.0.mlp.up_proj"
    optimizer = OPTIMIZERS[name]([p for n, p in model.named_parameters() if not n.startswith(frozen)])
    loss_of(model).backward()
    before = {name: layer.packed() for name, layer in quantized_layers(model).items()}
    optimizer.step()
    after = {name: layer.packed() for name, layer in quantized_layers(model).items()}
    assert all((after[name] is before[name]) == (name == frozen) for name in before)
    assert sum(int(after[name].changed_codes(before[name])[0]) for name in before) > 0
    assert all(layer.packed() is held[name] for name, layer in quantized_layers(other).items())


def test_a_graph_keeps_the_weight_its_forward_used():
    """Backward after the parameter changed (and the cache moved on) still uses the forward's W_dq."""
    scheme, model = parse("w4a16:g32"), tiny()
    convert_model(model, scheme)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(4, 128).bfloat16().requires_grad_()
    y = layer(x)
    w_dq = dequantize_weight(layer.packed())
    layer.weight.data.neg_()
    model.quant_cache.invalidate()
    layer.packed()
    y.sum().backward()
    assert torch.equal(x.grad, product.matmul(torch.ones(4, 256).bfloat16(), w_dq, torch.bfloat16))


def test_dequant_mode_keeps_what_the_products_read():
    for name, copies in (("w4a16:g32", 1), ("w8a8", 2)):
        model = tiny()
        convert_model(model, parse(name), cache="dequant")
        loss_of(model)
        weights = sum(m.weight.numel() for m in quantized_layers(model).values())
        packed = sum(layer.packed().nbytes for layer in quantized_layers(model).values())
        element = 2 if product.cpu_multiplies_bf16() else 4
        if name == "w4a16:g32":
            assert model.quant_cache.nbytes == packed + copies * element * weights


def test_rollout_arm_learns_in_bf16_but_can_run_quantized():
    model, aligned = tiny(), tiny()
    plain = tiny()
    convert_model(model, parse("w4a16:g32:rollout"))
    convert_model(aligned, parse("w4a16:g32"))
    convert_model(plain, parse("bf16"))
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens()).logits, plain(input_ids=tokens()).logits)
        assert model.quant_cache.stats.quantize_calls == 0
        with quantized_forward(model):
            assert torch.equal(model(input_ids=tokens()).logits, aligned(input_ids=tokens()).logits)
        assert torch.equal(model(input_ids=tokens()).logits, plain(input_ids=tokens()).logits)


def test_a_copied_model_has_its_own_empty_cache():
    model = tiny()
    convert_model(model, parse("w4a16:g32"), cache="dequant")
    loss_of(model)
    twin = copy.deepcopy(model)
    caches = {id(m.quant_cache) for m in twin.modules() if isinstance(m, QuantLinear)}
    assert caches == {id(twin.quant_cache)} != {id(model.quant_cache)}
    assert twin.quant_cache.mode == "dequant" and twin.quant_cache.nbytes == 0
    assert torch.equal(loss_of(twin), loss_of(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(loss_of(torch.load(buffer, weights_only=False)), loss_of(model))


def test_errors_name_the_layer():
    model = tiny()
    convert_model(model, parse("w4a16:g32"))
    layer = model.model.layers[1].mlp.down_proj
    layer.weight.data[3, 3] = float("nan")
    with pytest.raises(QuantError, match=r"model\.layers\.1\.mlp\.down_proj: 1 of"):
        loss_of(model)
    layer.weight.data = torch.empty(0, dtype=torch.bfloat16)
    layer.weight.ds_shape = torch.Size([128, 256])
    with pytest.raises(QuantError, match=r"model\.layers\.1\.mlp\.down_proj: the weight is partitioned"):
        loss_of(model)
    with pytest.raises(QuantError, match="'fast' is unknown: use one of packed, dequant, none"):
        convert_model(tiny(), parse("w8a8"), cache="fast")
