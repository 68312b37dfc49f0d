"""A layer that vLLM repacks, updated in place: the same target as on a card, with a layer that needs none."""

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from qarl_openrlhf.engine.target import GpuTarget
from qarl_openrlhf.sync.errors import ManifestError


class Repacking(QuantizeMethodBase):
    """As vLLM's: checkpoint tensors are replaced by others. Asks for the engine's config by making an operation of vLLM's."""

    __module__ = "vllm.repacking"  # what vLLM's own objects hold is put back

    def create_weights(self, layer, *args, **kwargs): ...

    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        self.quant = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.halved = layer.scale.data / 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("halved", None)
        self.quant_method = Repacking()


@pytest.fixture
def served():
    """(model as vLLM has it once it is loaded, target)."""
    config, model = VllmConfig(), nn.Module()
    model.layer = Layer()
    record_metadata_for_reloading(model)
    with set_current_vllm_config(config):
        model.layer.quant_method.process_weights_after_loading(model.layer)
    return model, GpuTarget(model, config)


def test_an_update_has_the_config_of_the_start_and_writes_in_place(served):
    model, target = served
    layer, made = model.layer, model.layer.quant_method.quant
    addresses = {name: tensor.data_ptr() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    for seed in (0, 1):
        weight, scale = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)), torch.full((4,), 3.0 + seed)
        target.begin()
        target.load({"layer.scale": scale})  # a layer's tensors may come in two buckets
        target.load({"layer.weight": weight})
        target.finish()
        assert torch.equal(layer.weight, weight.t()) and torch.equal(layer.scale, scale) and torch.equal(layer.halved, scale / 2)
        assert {name: tensor.data_ptr() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())} == addresses
        assert layer.quant_method.quant is made and list(layer._parameters) == ["weight", "scale"]
    assert get_current_vllm_config_or_none() is None


def test_an_update_without_a_tensor_of_a_layer_is_refused(served):
    model, target = served
    target.begin()
    target.load({"layer.weight": torch.randn(4, 6)})
    with pytest.raises(ManifestError, match="layer layer has not got all of its tensors"):
        target.finish()
    assert not model.layer.weight.any()
