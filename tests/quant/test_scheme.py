"""Scheme strings, what they refuse, and the config that vLLM and the library parse."""

import pytest
import torch
from qarl_openrlhf.kernels import dispatch
from qarl_openrlhf.quant import QuantError, QuantScheme, scheme
from qarl_openrlhf.quant.packing import quantize_weight

parse = QuantScheme.parse


@pytest.mark.parametrize("text", ["bf16", "w4a16", "w4a16:g32", "w4a16:g64:rollout", "w4a16:rollout", "w8a8", "fp8", "w4a8"])
def test_canonical_round_trip(text):
    scheme = parse(text)
    assert str(scheme) == text and parse(str(scheme)) == scheme and hash(scheme) == hash(parse(text))


def test_spellings_of_one_scheme():
    assert parse(" W4A16:rollout:g128 ") == parse("w4a16:rollout") == QuantScheme("w4a16", 128, True)


def test_properties():
    table = {s: (parse(s).quantized, parse(s).aligned, parse(s).weight_format, parse(s).activation_format)
             for s in ("bf16", "w4a16", "w4a16:rollout", "w8a8", "fp8", "w4a8")}  # fmt: skip
    assert table == {
        "bf16": (False, False, None, "bf16"),
        "w4a16": (True, True, "int4", "bf16"),
        "w4a16:rollout": (True, False, "int4", "bf16"),
        "w8a8": (True, True, "int8", "int8"),
        "fp8": (True, True, "fp8", "fp8"),
        "w4a8": (True, True, "int4", "fp8"),
    }


@pytest.mark.parametrize(
    "text, says",
    [
        ("w4a16_asym", "asymmetric"),
        ("w4a16:asym", "asymmetric"),
        ("awq", "asymmetric"),
        ("nvfp4", "FP4"),
        ("mxfp4", "FP4"),
        ("w3a16", "'w3a16' is unknown: schemes are bf16, w4a16, w8a8, fp8, w4a8"),
        ("", "unknown"),
        ("w4a16:g48", "w4a16:g32 or w4a16:g64 or w4a16:g128"),
        ("w4a8:g64", "use w4a8:g128"),
        ("w8a8:g64", "write w8a8"),
        ("bf16:rollout", "use bf16"),
        ("w4a16:g64:g32", "repeated"),
        ("w4a16:rollouts", "'rollouts'"),
    ],
)
def test_refused_by_name(text, says):
    with pytest.raises(QuantError, match=says):
        parse(text)


def test_layer_checks_name_what_would_work():
    expert = "model.layers.0.mlp.experts.0.down_proj"
    parse("w4a16").check_layer(expert, 2048, 768, tp=2)
    with pytest.raises(QuantError, match=rf"{expert} \[2048, 768\].*192.*w4a16:g32 or w4a16:g64; with w4a16 use TP 1 or 2"):
        parse("w4a16").check_layer(expert, 2048, 768, tp=4)
    with pytest.raises(QuantError, match="at TP 1 use w4a16:g32 or w4a16:g64$"):
        parse("w4a16").check_layer("model.layers.0.self_attn.q_proj", 576, 576)
    # Only down_proj and o_proj are split along K.
    parse("w4a16").check_layer("model.layers.0.mlp.up_proj", 768, 2048, tp=4)
    with pytest.raises(QuantError, match="576 input features do not divide by TP 5; with w8a8 use TP 1 or 2 or 4 or 8 or 16"):
        parse("w8a8").check_layer("model.layers.0.mlp.down_proj", 576, 576, tp=5)
    with pytest.raises(QuantError, match="multiples of 128"):
        parse("w4a8").check_layer("model.layers.0.mlp.up_proj", 192, 256)
    with pytest.raises(QuantError, match="share of a row.*use TP 1"):
        parse("w4a8").check_layer("model.layers.0.mlp.down_proj", 1024, 1024, tp=2)
    parse("bf16").check_layer("anything", 7, 13)


@pytest.mark.parametrize("name", ["w4a16:g64", "w8a8", "fp8", "w4a8"])
def test_the_library_parses_the_config(name):
    from compressed_tensors.quantization import QuantizationConfig

    config = parse(name).quantization_config(["lm_head"])
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.ignore == ["lm_head"]
    weights = parsed.config_groups["group_0"].weights
    assert weights.symmetric and weights.group_size == parse(name).group_size


@pytest.mark.parametrize(
    "name, vllm_scheme",
    [("w4a16:g64", "CompressedTensorsWNA16"), ("w8a8", "CompressedTensorsW8A8Int8")],
)
def test_vllm_picks_its_scheme_from_the_config(name, vllm_scheme):
    ct = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
    config = ct.CompressedTensorsConfig.from_config(parse(name).quantization_config(["lm_head"]))
    args = config.target_scheme_map["Linear"]
    chosen = config._get_scheme_from_parts(
        args["weights"], args["input_activations"], format=args["format"], layer_name="model.layers.0.mlp.up_proj"
    )
    assert type(chosen).__name__ == vllm_scheme
    assert config.ignore == ["lm_head"]


@pytest.mark.parametrize("name, predicate", [("fp8", "_is_fp8_w8a8"), ("w4a8", "_is_fp8_w4a8")])
def test_vllm_recognizes_what_needs_a_gpu(name, predicate):
    """These scheme classes are only made inside an engine (fp8) or on a Hopper GPU (w4a8)."""
    ct = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
    config = ct.CompressedTensorsConfig.from_config(parse(name).quantization_config([]))
    args = config.target_scheme_map["Linear"]
    assert getattr(config, predicate)(args["weights"], args["input_activations"])


def test_bf16_has_no_config():
    assert parse("bf16").quantization_config([]) is None


@pytest.mark.parametrize("tp", [0, -1, 1.5])
def test_a_tensor_parallel_size_that_does_not_exist_is_refused(tp):
    with pytest.raises(QuantError, match="tensor parallel size .* use 1 or more"):
        QuantScheme.parse("w4a16").check_layer("layers.0.o_proj", 128, 128, tp)


@pytest.mark.parametrize(
    "scheme, shape, hint",
    [("w4a16", (100, 100), "use w8a8, fp8, or bf16"), ("w4a8", (64, 128), "use w4a16:g32, w4a16:g64, w4a16, w8a8, fp8, or bf16")],
)
def test_where_no_group_size_fits_other_schemes_are_named(scheme, shape, hint):
    with pytest.raises(QuantError, match=hint):
        QuantScheme.parse(scheme).check_layer("layers.0.q_proj", *shape, device="cpu")


@pytest.mark.parametrize(
    "scheme, shape, message",
    [
        ("fp8", (16384, 53248), "rows of at most 32768 input features, not 53248; at TP 1 use w4a16:g32, w4a16:g64, w4a16, or bf16"),
        ("fp8:rollout", (16384, 53248), "rows of at most 32768"),  # the push quantizes the same rows
        ("w8a8", (4096, 53248), "rows of at most 32768"),
        ("w4a8", (16384, 53248), "rows of at most 32768"),
        ("w8a8", (4096, 1000), "multiples of 16, not 1000; no quantized scheme fits this layer: use bf16"),
        ("fp8", (4096, 2016 + 8), "multiples of 16, not 2024"),
    ],
)  # fmt: skip
def test_what_the_kernels_of_a_card_refuse_is_refused_at_the_start(scheme, shape, message):
    name = "model.layers.0.mlp.down_proj"
    with pytest.raises(QuantError, match=message) as refused:
        parse(scheme).check_layer(name, *shape, device="cuda")
    assert name in str(refused.value)
    parse(scheme).check_layer(name, *shape, device="cpu")  # the references run it


def test_what_a_card_takes():
    taken = {"w4a16": (16384, 53248), "fp8": (8192, 28672), "w8a8": (64, 32768), "w8a8:rollout": (4096, 1000), "w4a8": (256, 32768)}
    for text, shape in taken.items():
        parse(text).check_layer("model.layers.0.mlp.down_proj", *shape, device="cuda")


def test_the_device_is_by_default_the_one_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parse("w8a8").check_layer("layers.0.q_proj", 64, 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(QuantError, match="multiples of 16"):
        parse("w8a8").check_layer("layers.0.q_proj", 64, 1000)


def test_limits_are_those_of_the_kernels():
    quantize_pack = pytest.importorskip("qarl_openrlhf.kernels.quantize_pack")
    quantize_pack.row_launch(scheme.MAX_ROW)
    with pytest.raises(ValueError, match="do not fit in registers"):
        quantize_pack.row_launch(scheme.MAX_ROW + 1)


@pytest.mark.parametrize("name, shape", [("w8a8", (8, 1000)), ("fp8", (4, 32784)), ("w8a8", (4, 32784)), ("w4a8", (128, 32896))])
def test_the_references_on_a_cpu_run_what_a_card_refuses(name, shape):
    made = quantize_weight(torch.ones(shape, dtype=torch.bfloat16), parse(name), name="layers.0.down_proj")
    x = torch.ones(3, shape[1], dtype=torch.bfloat16)
    y = dispatch.quantized_linear(x, made, None, None, made.scheme)
    assert torch.allclose(y.float(), torch.full((3, shape[0]), float(shape[1])), rtol=0.1)
