"""An exported Qwen3-MoE, read back by the compressed-tensors library and by transformers, has the learner's experts bit for bit."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from qarl_openrlhf.export.write import INDEX_NAME, export_checkpoint
from qarl_openrlhf.quant import QuantScheme, dequantize_weight
from qarl_openrlhf.quant.convert import convert_model, published_tensors, quantized_layers
from qarl_openrlhf.quant.expert_names import to_checkpoint
from safetensors.torch import save_file
from tests.tiny_models import tiny_moe
from transformers import AutoModelForCausalLM

from .test_write import library_weight, read

parse = QuantScheme.parse


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "bf16"])
def test_export_reloads(tmp_path, name):
    scheme, model = parse(name), tiny_moe()
    convert_model(model, scheme)
    export_checkpoint(model, model.config, str(tmp_path / "out"), scheme)
    tensors = read(tmp_path / "out")
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale" in tensors or name == "bf16"
    wanted = dict(to_checkpoint(published_tensors(model, scheme)))
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[n], t) for n, t in wanted.items())

    config = json.load(open(tmp_path / "out" / "config.json"))
    quantization = config.pop("quantization_config", None)
    if quantization:
        assert quantization["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
        parsed = QuantizationConfig.model_validate(quantization)
        layers = {n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")}
        plain = {n: t for n, t in tensors.items() if not any(n.startswith(f"{layer}.weight") for layer in layers)}
        tensors = plain | {f"{layer}.weight": library_weight(tensors, layer, parsed) for layer in layers}
    (tmp_path / "dequantized").mkdir()
    save_file(tensors, tmp_path / "dequantized" / "model.safetensors", metadata={"format": "pt"})
    json.dump(config, open(tmp_path / "dequantized" / "config.json", "w"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized").named_parameters())
    layers = quantized_layers(model)
    for n, p in model.named_parameters():
        layer = layers.get(n, layers.get(n.removesuffix(".weight")))
        assert torch.equal(loaded[n], dequantize_weight(layer.packed()) if layer else p), n


def test_shards_of_stacked_weights(tmp_path):
    model = tiny_moe()
    convert_model(model, parse("w4a16:g32"))
    export_checkpoint(model, model.config, str(tmp_path / "out"), parse("w4a16:g32"), max_shard_size="20KB")
    index = json.load(open(tmp_path / "out" / INDEX_NAME))
    assert len(set(index["weight_map"].values())) > 3
    wanted, found = dict(to_checkpoint(published_tensors(model, parse("w4a16:g32")))), read(tmp_path / "out")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())
