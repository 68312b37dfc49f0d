"""Experts split over an engine's GPUs: which groups of 4-bit weights are refused, and what expert parallelism changes."""

import json
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.experts import check_groups, ranks_of
from qarl_openrlhf.quant.convert import LayerPlan
from qarl_openrlhf.quant.scheme import QuantScheme


def args(tp: int, device: str = "cuda", **engine_args):
    return N(device=device, vllm=N(tensor_parallel_size=tp, engine_args=json.dumps(engine_args)))


def down(features: int, scheme: str = "w4a16", experts: int = 128) -> LayerPlan:
    return LayerPlan("model.layers.3.mlp.experts.down_proj", 2048, features, QuantScheme.parse(scheme), "", experts)


def test_expert_parallel_ranks_hold_experts_whole():
    assert ranks_of(args(4), down(768)) == 4
    assert ranks_of(args(4, enable_expert_parallel=True), down(768)) == 1
    assert ranks_of(args(4, enable_expert_parallel=True), down(768, experts=1)) == 4  # a dense layer is split as ever


@pytest.mark.parametrize(
    ("given", "layer", "message"),
    [
        (args(2), down(256), r"model\.layers\.3\.\S+: 128 input features a rank .* w4a16:g64 or w4a16:g32, or a smaller .*enable_expert"),
        (args(1), down(128), "128 input features a rank .*use --quant.scheme w4a16:g64 or w4a16:g32$"),
        (args(1), down(32, "w4a16:g32"), "use --quant.scheme fp8$"),
        (args(1), down(64, "w4a16:g64")._replace(name="model.layers.3.mlp.experts.gate_up_proj"), "use --quant.scheme w4a16:g32$"),
    ],
)
def test_a_single_group_is_refused_on_a_gpu(given, layer, message):
    with pytest.raises(ConfigError, match=message):
        check_groups(given, layer)
    check_groups(args(given.vllm.tensor_parallel_size, device="cpu"), layer)  # our own kernels


@pytest.mark.parametrize(
    ("given", "layer"),
    [
        (args(2), down(768)),
        (args(2, enable_expert_parallel=True), down(256)),
        (args(2), down(256, "w4a16:g64")),
        (args(2), down(256, "fp8")),
        (args(2), down(256, experts=1)),
        (args(2), down(256)._replace(name="model.layers.3.mlp.experts.gate_up_proj")),
    ],
)
def test_what_runs(given, layer):
    check_groups(given, layer)
