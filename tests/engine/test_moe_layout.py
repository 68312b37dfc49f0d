"""Names of stacked expert tensors: vLLM's parameter -> what is pushed."""

from qarl_openrlhf.engine.moe_layout import checkpoint_name

BLOCK = "model.layers.0.mlp.experts"


def test_names_of_a_cpu_engines_parameters():
    for attribute, name in {
        "gate_up_proj": "gate_up_proj",
        "gate_up_proj_weight_packed": "gate_up_proj.weight_packed",
        "gate_up_proj_weight": "gate_up_proj.weight",
        "down_proj_weight_scale": "down_proj.weight_scale",
        "down_proj_weight_shape": "down_proj.weight_shape",
    }.items():
        assert checkpoint_name(f"{BLOCK}.routed_experts", attribute) == f"{BLOCK}.{name}"
        assert checkpoint_name(BLOCK, attribute) == f"{BLOCK}.{name}"
        assert checkpoint_name("", attribute) == name
