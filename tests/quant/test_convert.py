"""convert_model on the three families, and what is published."""

from contextlib import contextmanager

import pytest
import torch
from qarl_openrlhf.quant import QuantError, QuantScheme, quantize_weight
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from qarl_openrlhf.quant.linear import QuantLinear
from tests.tiny_models import FAMILIES, LINEARS, loss_of, tiny
from torch import nn
from transformers import AutoModelForCausalLM

parse = QuantScheme.parse


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_of_the_decoder_layers_and_nothing_else(family):
    model = tiny(family)
    before = {n: (id(p), p.shape) for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    report = convert_model(model, parse("w4a16:g64"))
    assert {n: (id(p), p.shape) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    names = {f"model.layers.{i}.{part}" for i in range(2) for part in
             [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]}  # fmt: skip
    assert {plan.name for plan in report.quantized} == names
    assert {n for n, m in model.named_modules() if isinstance(m, QuantLinear)} == names | {"lm_head"}
    (head,) = [plan for plan in report.layers if plan.scheme is None]
    assert head[:5] == ("lm_head", 160, 128, None, "outside the decoder layers")
    (q_proj,) = [plan for plan in report.layers if plan.name == "model.layers.1.self_attn.q_proj"]
    assert q_proj[:4] == (q_proj.name, 128, 128, parse("w4a16:g64"))


def test_report_table():
    text = convert_model(tiny(), parse("w4a16:g32"), cache="dequant").table()
    lines = [line.split(maxsplit=4) for line in text.splitlines()]
    assert ["model.layers.*.mlp.down_proj", "2", "[128,", "256]", "w4a16:g32"] in lines
    assert "lm_head" in text and "outside the decoder layers" in text
    assert text.splitlines()[-1] == "14 of 15 linear layers in w4a16:g32 (0.3 M weights), cache dequant"


def test_tied_embeddings_stay_tied_and_are_published_once():
    model = tiny(tie_word_embeddings=True)
    convert_model(model, parse("w8a8"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in published_tensors(model, parse("w8a8"))]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    loss_of(model).backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8:rollout", "bf16"])
def test_published_tensors(family, name):
    scheme, model = parse(name), tiny(family)
    convert_model(model, scheme)
    if scheme.aligned:
        loss_of(model)
    calls = model.quant_cache.stats.quantize_calls
    published = list(published_tensors(model, scheme))
    assert model.quant_cache.stats.quantize_calls == (LINEARS if scheme.quantized else 0)
    assert not scheme.aligned or calls == LINEARS  # made by the forward, not made again
    names = [n for n, _ in published]
    assert len(names) == len(set(names))
    tensors = dict(published)
    for n, p in model.named_parameters():
        module = model.get_submodule(n.rpartition(".")[0])
        if scheme.quantized and isinstance(module, QuantLinear) and module.scheme and n.endswith(".weight"):
            for suffix, tensor in quantize_weight(p, scheme).tensors().items():
                assert torch.equal(tensors.pop(f"{n.removesuffix('weight')}{suffix}"), tensor)
        else:
            assert torch.equal(tensors.pop(n), p)
    assert not tensors
    assert not any(t.requires_grad for _, t in published)


def test_skipped_layers_and_router_gates_stay_plain():
    model = tiny()
    model.model.layers[0].mlp.gate = nn.Linear(128, 4)  # where a MoE block has its router
    report = convert_model(model, parse("w4a16:g32"), skip=("*.1.mlp.*", "model.layers.0.self_attn.q_proj"))
    reasons = {plan.name: plan.reason for plan in report.layers if plan.scheme is None}
    assert reasons == {
        "model.layers.0.mlp.gate": "router gate",
        "model.layers.0.self_attn.q_proj": "skipped by name",
        **{f"model.layers.1.mlp.{x}_proj": "skipped by name" for x in ("gate", "up", "down")},
        "lm_head": "outside the decoder layers",
    }
    names = {name for name, _ in published_tensors(model, parse("w4a16:g32"))}
    assert "model.layers.1.mlp.up_proj.weight" in names and "model.layers.0.mlp.up_proj.weight_packed" in names


def test_meta_models_can_be_planned():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("qwen3").config)
    assert len(convert_model(model, parse("w4a16:g64")).quantized) == LINEARS


def test_refusals_change_nothing():
    with pytest.raises(QuantError, match=r"model\.layers\.0\.mlp\.down_proj \[128, 192\].*use w4a16:g32 or w4a16:g64"):
        convert_model(tiny(intermediate_size=192), parse("w4a16"))
    model = tiny()
    with pytest.raises(QuantError, match=r"o_proj.*TP 4: 32 input features a rank.*at TP 4 use w4a16:g32; with w4a16 use TP 1"):
        convert_model(model, parse("w4a16"), tp=4)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear and not hasattr(model, "quant_cache")
    convert_model(model, parse("w4a16"))
    with pytest.raises(QuantError, match="LlamaForCausalLM is converted already"):
        convert_model(model, parse("w4a16"))
    with pytest.raises(QuantError, match=r"converted for \['w4a16'\], not for w8a8"):
        next(published_tensors(model, parse("w8a8")))
    with pytest.raises(QuantError, match="no nn.Linear in a `layers.N.` module"):
        convert_model(nn.Sequential(nn.Linear(64, 64)), parse("w8a8"))
    model = tiny()
    model.model.layers[1].mlp.experts = nn.Module()
    model.model.layers[1].mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 128))
    with pytest.raises(QuantError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj \[4, 64, 128\]: fused MoE experts"):
        convert_model(model, parse("w4a16"))
    convert_model(model, parse("bf16"))


def test_save_pretrained_saves_the_bf16_model(tmp_path):
    model = tiny("qwen2")
    plain = loss_of(model)
    convert_model(model, parse("w4a16:g32"))
    assert not torch.equal(loss_of(model), plain)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    for (n, p), (_, q) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(p, q), n


def test_what_the_cache_holds_is_not_gathered():
    """Under ZeRO-3 a gather is a collective: the push after a forward needs it only for unquantized parameters."""
    model, gathered = tiny(), []
    convert_model(model, parse("w4a16"))

    @contextmanager
    def gather(parameters):
        gathered.extend(parameters)
        yield

    plain = [p for n, p in model.named_parameters() if "_proj" not in n]
    list(published_tensors(model, parse("w4a16"), gather=gather))
    assert len(gathered) == len(list(model.parameters()))
    gathered.clear()
    list(published_tensors(model, parse("w4a16"), gather=gather))
    assert [id(p) for p in gathered] == [id(p) for p in plain]


@pytest.mark.parametrize("second", ["bf16", "w8a8", "w4a16:g64"])
@pytest.mark.parametrize("first", ["bf16", "w8a8"])
def test_a_model_is_converted_once(first, second):
    model = tiny()
    convert_model(model, parse(first))
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(QuantError, match="is converted already: load the model anew"):
        convert_model(model, parse(second))
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert dict(published_tensors(model, parse(first)))


@pytest.mark.parametrize("name", ["bf16", "w8a8"])
def test_an_unconverted_model_publishes_nothing(name):
    with pytest.raises(QuantError, match="is not converted: call convert_model"):
        next(published_tensors(tiny(), parse(name)))


@pytest.mark.parametrize("skip", ["*.q_proj", "lm_head", ""])
def test_skip_is_no_string(skip):
    model = tiny()
    with pytest.raises(QuantError, match="is a string: give a tuple"):
        convert_model(model, parse("w8a8"), skip=skip)
    assert not any(isinstance(module, QuantLinear) for module in model.modules()) and not hasattr(model, "quant_cache")


@pytest.mark.parametrize("name", ["w4a16:g64", "w8a8", "fp8", "w4a8"])
@pytest.mark.parametrize("shape", [(8, 0), (2, 8, 0), (0, 0)])
def test_rows_without_weights(name, shape):
    with pytest.raises(QuantError, match=r"layer: \[.*0\] has rows without weights"):
        quantize_weight(torch.zeros(shape, dtype=torch.bfloat16), parse(name), name="layer")
