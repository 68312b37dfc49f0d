"""An exported checkpoint, read back without vLLM, has the learner's effective weights bit for bit."""

import json
import os

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from qarl_openrlhf.export.write import INDEX_NAME, export_checkpoint
from qarl_openrlhf.quant import QuantError, QuantScheme, dequantize_weight, finite
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from qarl_openrlhf.quant.linear import QuantLinear
from safetensors.torch import load_file
from tests.tiny_models import FAMILIES, loss_of, tiny
from transformers import AutoConfig

parse = QuantScheme.parse


def read(directory) -> dict:
    files = [f for f in os.listdir(directory) if f.endswith(".safetensors")]
    return {name: t for f in files for name, t in load_file(os.path.join(directory, f)).items()}


def library_weight(tensors: dict, layer: str, config: QuantizationConfig) -> torch.Tensor:
    scheme = config.config_groups["group_0"]
    state = {n.removeprefix(f"{layer}."): t for n, t in tensors.items() if n.startswith(f"{layer}.weight")}
    return BaseCompressor.get_value_from_registry(config.format).decompress(state, scheme)["weight"]


@pytest.mark.parametrize("name", ["w4a16:g64", "w8a8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_decompresses_the_learners_weights(tmp_path, family, name):
    scheme, model = parse(name), tiny(family, tie_word_embeddings=family == "qwen3")
    convert_model(model, scheme)
    loss_of(model)
    export_checkpoint(model, model.config, str(tmp_path / "out"), scheme)
    tensors = read(tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    quantization = QuantizationConfig.model_validate(
        {k: v for k, v in json.load(open(tmp_path / "out" / "config.json"))["quantization_config"].items()}
    )
    assert quantization.ignore == ["lm_head"] and config.architectures == [type(model).__name__]
    assert not hasattr(model.config, "quantization_config")
    for n, p in model.named_parameters():
        layer = n.removesuffix(".weight")
        module = model.get_submodule(n.rpartition(".")[0])
        if isinstance(module, QuantLinear) and module.scheme and n.endswith(".weight"):
            assert torch.equal(library_weight(tensors, layer, quantization), dequantize_weight(module.packed())), n
        else:
            assert torch.equal(tensors[n], p), n
    assert (tmp_path / "out" / "generation_config.json").exists()


def test_plain_layers_are_listed_and_bf16_has_no_quantization_config(tmp_path):
    model = tiny()
    convert_model(model, parse("w8a8"), skip=("*.layers.0.mlp.*",))
    export_checkpoint(model, model.config, str(tmp_path / "q"), parse("w8a8"))
    config = json.load(open(tmp_path / "q" / "config.json"))
    assert config["quantization_config"]["ignore"] == ["lm_head"] + [
        f"model.layers.0.mlp.{x}_proj" for x in ("down", "gate", "up")
    ]
    plain = tiny()
    convert_model(plain, parse("bf16"))
    export_checkpoint(published_tensors(plain, parse("bf16")), plain.config, str(tmp_path / "b"), parse("bf16"))
    assert "quantization_config" not in json.load(open(tmp_path / "b" / "config.json"))
    assert torch.equal(read(tmp_path / "b")["lm_head.weight"], plain.lm_head.weight)


def test_large_models_are_sharded(tmp_path):
    model = tiny()
    convert_model(model, parse("w4a16"))
    export_checkpoint(model, model.config, str(tmp_path / "out"), parse("w4a16"), max_shard_size="50KB")
    index = json.load(open(tmp_path / "out" / INDEX_NAME))["weight_map"]
    published = dict(published_tensors(model, parse("w4a16")))
    assert set(index) == set(published) and len(set(index.values())) > 1
    tensors = read(tmp_path / "out")
    assert all(torch.equal(tensors[name], published[name]) for name in published)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_found_in_every_dtype(dtype, value):
    values = torch.ones(3, 5).to(dtype)
    finite.require([("good", values), ("codes", torch.full((2,), 7)), ("empty", torch.empty(0))])
    if torch.isfinite(torch.tensor(value).to(dtype).float()):
        return  # E4M3 has no infinity
    values[1, 2] = value
    with pytest.raises(QuantError, match="model: bad: 1 of 15 values are NaN or infinite"):
        finite.require([("good", torch.ones(2)), ("bad", values)], "model: ")


def test_an_export_is_whole_or_absent(tmp_path):
    model = tiny()
    convert_model(model, parse("w8a8"))
    out = tmp_path / "out"

    class Failing:
        def save_pretrained(self, directory):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_checkpoint(model, model.config, str(out), parse("w8a8"), tokenizer=Failing())
    assert os.listdir(tmp_path) == []
    export_checkpoint(model, model.config, str(out), parse("w8a8"))
    (out / "stale").write_text("x")
    with pytest.raises(OSError):
        export_checkpoint(model, model.config, str(out), parse("w8a8"), tokenizer=Failing())
    assert (out / "stale").exists()
    export_checkpoint(model, model.config, str(out), parse("w8a8"))
    assert not (out / "stale").exists() and os.listdir(tmp_path) == ["out"]
