"""Quantized experts of a tiny Qwen3-MoE: what is multiplied, gradients, one quantization a step, what is published."""

import copy

import pytest
import torch
from qarl_openrlhf.kernels import grouped
from qarl_openrlhf.quant import QuantError, QuantScheme, dequantize_weight, quantize_weight
from qarl_openrlhf.quant.convert import convert_model, published_tensors, quantized_layers
from qarl_openrlhf.quant.experts import IMPLEMENTATION, check
from qarl_openrlhf.quant.linear import quantized_forward
from tests.tiny_models import LAYERS, MOE_LAYERS, loss_of, tiny_moe, tokens

parse = QuantScheme.parse
PROJECTIONS = ("gate_up_proj", "down_proj")


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()).logits.float()


def dequantized_model(model):
    """A copy of the unconverted model whose quantized weights are replaced by their effective ones, and its layers' names."""
    plain = tiny_moe(dtype=model.dtype)
    parameters = dict(plain.named_parameters())
    for name, layer in quantized_layers(model).items():
        target = parameters.get(name, parameters.get(f"{name}.weight"))
        target.data.copy_(dequantize_weight(layer.packed(), target.dtype))
    return plain


def test_every_expert_weight_and_linear_is_planned():
    model = tiny_moe()
    before = {n: (id(p), p.shape) for n, p in model.named_parameters()}
    report = convert_model(model, parse("w4a16:g32"))
    assert {n: (id(p), p.shape) for n, p in model.named_parameters()} == before
    assert len(report.quantized) == MOE_LAYERS
    blocks = [plan for plan in report.layers if plan.experts > 1]
    assert [plan[:3] + (plan.experts,) for plan in blocks[:2]] == [
        ("model.layers.0.mlp.experts.gate_up_proj", 128, 128, 4),
        ("model.layers.0.mlp.experts.down_proj", 128, 64, 4),
    ]
    assert not any("mlp.gate" in plan.name for plan in report.quantized)
    lines = [line.split() for line in report.table().splitlines()]
    assert ["model.layers.*.mlp.experts.gate_up_proj", "2", "4", "x", "[128,", "128]", "w4a16:g32"] in lines
    assert set(quantized_layers(model)) == {plan.name for plan in report.quantized}


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "fp8"])
def test_each_expert_is_quantized_as_if_alone(name):
    model, scheme = tiny_moe(), parse(name)
    convert_model(model, scheme)
    for layer in quantized_layers(model).values():
        if layer.weight.dim() == 2:
            continue
        stacked = layer.packed()
        for e in range(4):
            alone = quantize_weight(layer.weight[e], scheme).tensors()
            mine = grouped.expert(stacked, e).tensors()
            assert all(torch.equal(mine[suffix].view(torch.uint8), t.view(torch.uint8)) for suffix, t in alone.items())


def test_the_bf16_scheme_is_transformers_own_forward():
    model = tiny_moe(dtype=torch.float32)
    plain = logits_of(model)
    convert_model(model, parse("bf16"))
    assert model.config._experts_implementation == IMPLEMENTATION
    assert (logits_of(model) - plain).abs().max() < 1e-4


@pytest.mark.parametrize("cache", ["packed", "dequant", "none"])
def test_w4a16_is_the_dequantized_model(cache):
    model = tiny_moe(dtype=torch.float32)
    plain = logits_of(model)
    convert_model(model, parse("w4a16:g32"), cache=cache)
    quantized = logits_of(model)
    assert (quantized - logits_of(dequantized_model(model))).abs().max() < 1e-4
    assert (quantized - plain).abs().max() > 1e-2


def test_w8a8_quantizes_the_activations_too():
    model = tiny_moe(dtype=torch.float32)
    convert_model(model, parse("w8a8"))
    gap = (logits_of(model) - logits_of(dequantized_model(model))).abs()
    assert 1e-4 < gap.mean() < 0.2


def test_rollout_only_stays_in_bf16_until_asked():
    model = tiny_moe()
    convert_model(model, parse("bf16"))
    plain = logits_of(model)
    model = tiny_moe()
    convert_model(model, parse("w4a16:g32:rollout"))
    assert torch.equal(logits_of(model), plain)
    with quantized_forward(model):
        asked = logits_of(model)
    aligned = tiny_moe()
    convert_model(aligned, parse("w4a16:g32"))
    assert torch.equal(asked, logits_of(aligned)) and not torch.equal(asked, plain)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["w4a16:g32", "bf16"])
def test_gradients_are_autograds_on_the_dequantized_model(name, checkpointing):
    """Straight-through: every gradient, the router's and the layers' below too, is that of the model with W_dq in place."""
    model = tiny_moe(dtype=torch.float32)
    convert_model(model, parse(name))
    plain = dequantized_model(model)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of(model).backward()
    loss_of(plain).backward()
    mine, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    for n, p in theirs.items():
        assert mine[n].grad is not None, n
        assert (mine[n].grad - p.grad).norm() <= 1e-4 * p.grad.norm(), n
        assert p.grad.norm() > 0, n


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_gradients_with_8_bit_activations_use_unquantized_ones(name):
    """dW = dY^T X with X as it came in, dX = dY W_dq: checked on one product, where both are known."""
    model = tiny_moe()
    convert_model(model, parse(name))
    weight = quantized_layers(model)["model.layers.0.mlp.experts.down_proj"]
    x = torch.randn(10, 64).bfloat16().requires_grad_()
    ends = torch.tensor([3, 3, 7, 10], dtype=torch.int32)
    dy = torch.randn(10, 128).bfloat16()
    weight(x, ends).backward(dy)
    wdq = dequantize_weight(weight.packed()).float()
    for e, (start, end) in enumerate([(0, 3), (3, 3), (3, 7), (7, 10)]):
        dx, dw = dy[start:end].float() @ wdq[e], dy[start:end].float().t() @ x[start:end].detach().float()
        assert torch.allclose(x.grad[start:end].float(), dx, rtol=1e-2, atol=1e-2)
        assert torch.allclose(weight.weight.grad[e].float(), dw, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cache", ["packed", "dequant"])
def test_one_quantization_a_step(cache):
    model = tiny_moe()
    convert_model(model, parse("w4a16:g32"), cache=cache)
    stats = model.quant_cache.stats
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        loss_of(model).backward()
    dict(published_tensors(model, parse("w4a16:g32")))
    assert stats.quantize_calls == MOE_LAYERS
    model.quant_cache.invalidate()
    loss_of(model)
    assert stats.quantize_calls == 2 * MOE_LAYERS


def test_cache_modes_publish_the_same_bytes():
    published = []
    for cache in ("packed", "dequant", "none"):
        model = tiny_moe()
        convert_model(model, parse("w4a16:g32"), cache=cache)
        loss_of(model)
        published.append(dict(published_tensors(model, parse("w4a16:g32"))))
    for other in published[1:]:
        assert published[0].keys() == other.keys()
        assert all(torch.equal(t, other[n]) for n, t in published[0].items())


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "bf16"])
def test_experts_are_published_as_one_tensor_a_layer(name):
    model, scheme = tiny_moe(), parse(name)
    convert_model(model, scheme)
    published = dict(published_tensors(model, scheme))
    experts = {n: list(t.shape) for n, t in published.items() if ".experts." in n and ".0." in n}
    prefix = "model.layers.0.mlp.experts"
    assert experts == {
        "w4a16:g32": {
            f"{prefix}.gate_up_proj.weight_packed": [4, 128, 16],
            f"{prefix}.gate_up_proj.weight_scale": [4, 128, 4],
            f"{prefix}.gate_up_proj.weight_shape": [2],
            f"{prefix}.down_proj.weight_packed": [4, 128, 8],
            f"{prefix}.down_proj.weight_scale": [4, 128, 2],
            f"{prefix}.down_proj.weight_shape": [2],
        },
        "w8a8": {
            f"{prefix}.gate_up_proj.weight": [4, 128, 128],
            f"{prefix}.gate_up_proj.weight_scale": [4, 128, 1],
            f"{prefix}.down_proj.weight": [4, 128, 64],
            f"{prefix}.down_proj.weight_scale": [4, 128, 1],
        },
        "bf16": {f"{prefix}.gate_up_proj": [4, 128, 128], f"{prefix}.down_proj": [4, 128, 64]},
    }[name]
    assert published["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16


def test_routing_weights_stay_in_float32():
    model = tiny_moe()
    convert_model(model, parse("w4a16:g32"))
    router = model.model.layers[0].mlp.gate
    logits, weights, ids = router(torch.randn(7, 128).bfloat16())
    assert logits.dtype == torch.bfloat16 and weights.dtype == torch.float32
    chosen = torch.softmax(logits.float(), -1).topk(2)
    assert torch.equal(ids, chosen.indices)
    assert torch.equal(weights, chosen.values / chosen.values.sum(-1, keepdim=True))


def test_copies_have_caches_of_their_own():
    model = tiny_moe()
    convert_model(model, parse("w4a16:g32"))
    before = logits_of(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.experts.down_proj.mul_(2)
    assert not torch.equal(logits_of(twin), before)
    assert torch.equal(logits_of(model), before)


def test_skipped_experts_stay_plain():
    model = tiny_moe()
    report = convert_model(model, parse("w4a16:g32"), skip=("*.0.mlp.experts.*",))
    assert len(report.quantized) == MOE_LAYERS - 2
    names = {n for n, _ in published_tensors(model, parse("w4a16:g32"))}
    assert "model.layers.0.mlp.experts.down_proj" in names
    assert "model.layers.1.mlp.experts.down_proj.weight_packed" in names
    loss_of(model)


def test_what_cannot_run_is_refused_by_name():
    with pytest.raises(QuantError, match=r"layers\.0\.mlp\.experts\.down_proj \[128, 96\].*group size 64; at TP 1 use w4a16:g32"):
        convert_model(tiny_moe(moe_intermediate_size=96), parse("w4a16:g64"))
    with pytest.raises(QuantError, match=r"experts\.down_proj.*TP 4.*use TP 1 or 2"):
        convert_model(tiny_moe(num_key_value_heads=4), parse("w4a16:g32"), tp=4)
    with pytest.raises(QuantError, match=r"experts\.gate_up_proj.*multiples of 256, not 128 and 64"):
        parse("w4a8").check_layer("model.layers.0.mlp.experts.gate_up_proj", 128, 128)
    with pytest.raises(QuantError, match=r"model\.layers\.0\.mlp\.experts \(Qwen3MoeExperts\).*activation is GELUActivation.*Qwen3-MoE"):
        convert_model(tiny_moe(hidden_act="gelu"), parse("w4a16:g32"))
    model = tiny_moe()
    convert_model(model, parse("w4a16:g32"))
    with pytest.raises(QuantError, match="quantized already"):
        check(model.model.layers[0].mlp.experts, "x.experts")


def test_layers_without_experts_run_beside_them():
    model = tiny_moe(mlp_only_layers=[0])
    report = convert_model(model, parse("w4a16:g32"))
    assert len(report.quantized) == 7 + 6 and LAYERS == 2
    loss_of(model).backward()
