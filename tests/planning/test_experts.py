"""Experts split over an engine's GPUs: what expert parallelism changes."""

import json
from types import SimpleNamespace as N

from qarl_openrlhf.planning.experts import ranks_of
from qarl_openrlhf.quant.convert import LayerPlan
from qarl_openrlhf.quant.scheme import QuantScheme


def args(tp: int, **engine_args):
    return N(vllm=N(tensor_parallel_size=tp, engine_args=json.dumps(engine_args)))


def down(experts: int) -> LayerPlan:
    return LayerPlan("model.layers.3.mlp.experts.down_proj", 2048, 768, QuantScheme.parse("w4a16"), "", experts)


def test_expert_parallel_ranks_hold_experts_whole():
    assert ranks_of(args(4), down(128)) == 4
    assert ranks_of(args(4, enable_expert_parallel=True), down(128)) == 1
    assert ranks_of(args(4, enable_expert_parallel=True), down(1)) == 4  # a dense layer is split as ever
