"""Which changes make a cached weight stale, and which do not: another parameter, dtype or device do, another storage does not."""

import weakref

import pytest
import torch
from torch import nn

from qarl_openrlhf.config import default_cache
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model, quantized_layers
from tests.tiny_models import LINEARS, MOE_LAYERS, tiny, tiny_moe, tokens

SCHEME = QuantScheme.parse("w4a16:g32")
MODELS = {"dense": (tiny, LINEARS), "experts": (tiny_moe, MOE_LAYERS)}


def halved(model) -> dict:
    return {name: value / 2 for name, value in model.state_dict().items()}


def copy_(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter / 2)


def new_parameters(model):
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach() / 2))


def optimizer_step(make):
    def step(model):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        make(model.parameters()).step()

    return step


CHANGES = {
    "copy_": copy_,
    "load_state_dict": lambda model: model.load_state_dict(halved(model)),
    "load_state_dict, assigned": lambda model: model.load_state_dict(halved(model), assign=True),
    "new parameters": new_parameters,
    "float": lambda model: model.float(),
    "a step": optimizer_step(lambda p: torch.optim.SGD(p, lr=0.02)),
    "a fused step": optimizer_step(lambda p: torch.optim.AdamW(p, lr=0.02, fused=True)),
}


def made(kind: str):
    """A model whose parameters no write has counted, as those that are loaded: another one's version is the same."""
    model = MODELS[kind][0]()
    model.load_state_dict(model.state_dict(), assign=True)
    new_parameters(model)
    return model


@pytest.mark.parametrize("mode", ["packed", "dequant"])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("kind", list(MODELS))
@torch.no_grad()
def test_the_forward_is_that_of_the_changed_weights(kind, change, mode):
    model, fresh = made(kind), made(kind)
    convert_model(model, SCHEME, cache=mode)
    model(input_ids=tokens())
    for each in (model, fresh):
        CHANGES[change](each)
    convert_model(fresh, SCHEME, cache=mode)
    assert torch.equal(model(input_ids=tokens()).logits, fresh(input_ids=tokens()).logits)
    assert model.quant_cache.stats.quantize_calls == 2 * MODELS[kind][1]


CARD = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])


@pytest.mark.parametrize("device", ["meta", CARD])  # "meta" comes with new parameters, "cuda" with new data of the old ones
@pytest.mark.parametrize("kind", list(MODELS))
def test_another_device_is_noticed(kind, device):
    model = made(kind)
    convert_model(model, SCHEME)
    layers = quantized_layers(model).values()
    assert all(layer.packed() and layer.is_packed() for layer in layers)
    model.to(device)
    assert not any(layer.is_packed() for layer in layers)


@pytest.mark.parametrize("kind", list(MODELS))
def test_another_storage_is_not(kind):
    """ZeRO-3 frees a parameter and gathers it into new memory; what sleeps is moved away and back. The parameter is the same."""
    model = made(kind)
    convert_model(model, SCHEME)
    layers = quantized_layers(model).values()
    first = [layer.packed() for layer in layers]
    for layer in layers:
        whole = layer.weight.data
        layer.weight.ds_shape = whole.shape
        layer.weight.data = torch.empty(0, dtype=whole.dtype, device=whole.device)
        assert layer.is_packed()
        layer.weight.data = whole.clone()
    assert all(layer.packed() is packed for layer, packed in zip(layers, first, strict=True))
    assert model.quant_cache.stats.quantize_calls == MODELS[kind][1]


def test_a_parameter_that_is_gone_is_not_held():
    model = made("dense")
    convert_model(model, SCHEME)
    layer = model.model.layers[0].mlp.up_proj
    layer.packed()
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert old() is None and not layer.is_packed()
    torch.optim.SGD([layer.weight], lr=0.1).step()  # forgets what was made from it
    assert model.quant_cache.nbytes == 0


@pytest.mark.parametrize(
    "zero, device, scheme, mode",
    [(2, "cuda", "w4a16", "dequant"), (3, "cuda", "w4a16", "packed"), (3, "cpu", "w8a8", "dequant"), (2, "cuda", "w4a16:rollout", "packed"), (3, "cpu", "w8a8:rollout", "packed")],
)  # fmt: skip
def test_no_copy_is_kept_where_training_multiplies_none(zero, device, scheme, mode):
    assert default_cache(zero, device, QuantScheme.parse(scheme)) == mode
