"""Names of stacked expert tensors: vLLM's parameter -> what is pushed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle import int_wna16

from qarl_openrlhf.engine import gpu_moe
from qarl_openrlhf.engine.moe_layout import checkpoint_name, expert_slot
from qarl_openrlhf.patches import vllm_experts

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


def test_one_group_a_rank_is_no_scale_a_channel():
    """Both are [E, H, 1] on a rank of two; only the group's is a half of what is pushed."""
    layer = nn.Module()
    layer.moe_config = SimpleNamespace(tp_size=2, tp_rank=1)
    layer.down_proj_weight_scale = nn.Parameter(torch.zeros(4, 8, 1), requires_grad=False)
    assert expert_slot(layer, BLOCK, "down_proj_weight_scale").shape == (4, 8, 1)
    layer.down_proj_weight_packed = nn.Parameter(torch.zeros(4, 8, 4, dtype=torch.int32), requires_grad=False)
    slot = expert_slot(layer, BLOCK, "down_proj_weight_scale")
    assert slot.shape == (4, 8, 2)
    pushed = torch.arange(64.0).view(4, 8, 2)
    assert torch.equal(slot.part.of(pushed), pushed[..., 1:])


def test_one_group_a_rank_is_no_scale_a_channel_on_a_gpu():
    """W4A8's scales are [E, H, K / G], not transposed: codes that are packed tell them from those of a channel."""
    layer = nn.Module()
    layer.moe_config, layer.local_num_experts = SimpleNamespace(tp_size=2, tp_rank=1, num_experts=4), 4
    scale, packed = torch.zeros(4, 8, 1), torch.zeros(4, 8, 16, dtype=torch.int32)
    own = {"w13_weight_scale": scale, "w2_weight_scale": scale}
    for own, columns in ((own, 1), (own | {"w2_weight_packed": packed}, 2)):
        slot = gpu_moe.expert_slot(f"{BLOCK}.routed_experts", layer, "w2_weight_scale", own)
        pushed = torch.arange(32.0 * columns).view(4, 8, columns)
        assert slot.shape == pushed.shape and torch.equal(slot.part.of(pushed), pushed[..., -1:])


def test_a_gpu_engines_halves():
    """A rank's gate rows, then its up rows, of its run of experts, into a transposed parameter."""
    layer = nn.Module()
    layer.moe_config, layer.local_num_experts = SimpleNamespace(tp_size=2, tp_rank=1, num_experts=4), 2
    layer._expert_map = torch.tensor([-1, -1, 0, 1])
    parameter = nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)
    parameter.is_transposed = True
    slot = gpu_moe.expert_slot(f"{BLOCK}.routed_experts", layer, "w13_weight", {"w13_weight": parameter})
    pushed = torch.arange(4.0 * 8 * 3).view(4, 8, 3)
    assert slot.name == f"{BLOCK}.gate_up_proj" and slot.shape == pushed.shape
    slot.read().copy_(slot.part.of(pushed))
    assert torch.equal(parameter.transpose(1, 2), pushed[2:, [2, 3, 6, 7]])


def test_a_gpu_engines_scales_of_a_rank():
    """Marlin's checkpoint layout [E, K / G, N]; also where a rank's share is one group."""
    layer = nn.Module()
    layer.moe_config, layer.local_num_experts = SimpleNamespace(tp_size=2, tp_rank=1, num_experts=4), 4

    def slot(groups: int):
        scale = nn.Parameter(torch.zeros(4, groups, 8), requires_grad=False)
        scale.is_transposed = True
        own = {"w13_weight_scale": scale, "w2_weight_scale": scale, "w2_weight_packed": packed}
        return gpu_moe.expert_slot(f"{BLOCK}.routed_experts", layer, "w2_weight_scale", own)

    packed = nn.Parameter(torch.zeros(4, 2, 8, dtype=torch.int32), requires_grad=False)
    packed.is_transposed = True
    for groups in (2, 1):
        assert slot(groups).shape == (4, 8, 2 * groups)
        pushed = torch.arange(64.0 * groups).view(4, 8, 2 * groups)
        assert torch.equal(slot(groups).part.of(pushed), pushed[..., groups:])
    own = {"w13_weight_scale": packed, "w2_weight_packed": packed}
    assert gpu_moe.expert_slot(f"{BLOCK}.routed_experts", layer, "w2_weight_packed", own).shape == (4, 8, 4)
    assert int_wna16.marlin_moe_permute_scales is vllm_experts.permute_scales  # from now on, for its pushes
