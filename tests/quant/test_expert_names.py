"""Every name of an expert's tensor, from the push to the checkpoint."""

import pytest
import torch
from qarl_openrlhf.quant import QuantError, QuantScheme
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from qarl_openrlhf.quant.expert_names import to_checkpoint
from tests.tiny_models import tiny_moe

parse = QuantScheme.parse
BLOCK = "model.layers.0.mlp.experts"


def published(name: str) -> dict[str, torch.Tensor]:
    model = tiny_moe()
    convert_model(model, parse(name))
    return dict(published_tensors(model, parse(name)))


@pytest.mark.parametrize("name", ["w4a16:g32", "w8a8", "fp8", "bf16"])
def test_each_name_holds_its_own_rows(name):
    pushed = published(name)
    listed = list(to_checkpoint(pushed.items()))
    split = dict(listed)
    assert len(split) == len(listed)
    for stacked, tensor in pushed.items():
        if ".experts." not in stacked:
            assert split.pop(stacked) is tensor
            continue
        prefix, _, rest = stacked.partition(".experts.")
        projection, _, suffix = rest.partition(".")
        suffix = suffix or "weight"
        for e in range(4):
            if projection == "down_proj":
                wanted = {"down_proj": tensor if suffix == "weight_shape" else tensor[e]}
            elif suffix == "weight_shape":
                wanted = {half: torch.tensor([64, 128]) for half in ("gate_proj", "up_proj")}
            else:
                wanted = {"gate_proj": tensor[e, :64], "up_proj": tensor[e, 64:]}
            for half, rows in wanted.items():
                one = split.pop(f"{prefix}.experts.{e}.{half}.{suffix}")
                assert one.shape == rows.shape and torch.equal(one.view(torch.uint8), rows.view(torch.uint8))
    assert not split


def test_the_names_are_those_of_published_checkpoints():
    names = {n for n, _ in to_checkpoint(published("w4a16:g32").items()) if n.startswith(f"{BLOCK}.3.")}
    assert names == {
        f"{BLOCK}.3.{projection}.{suffix}"
        for projection in ("gate_proj", "up_proj", "down_proj")
        for suffix in ("weight_packed", "weight_scale", "weight_shape")
    }


def test_a_shape_before_the_weights_that_tell_how_many_experts_there_are_is_refused():
    with pytest.raises(QuantError, match="number of experts is not known"):
        list(to_checkpoint([(f"{BLOCK}.down_proj.weight_shape", torch.tensor([128, 64]))]))
