"""4-bit experts in Marlin's layout: all at once is one by one, and the number of groups chooses the permutation of scales."""

import pytest
import torch

from qarl_openrlhf.patches import vllm_experts

marlin_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils")


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_permuted_as_expert_by_expert(groups, dtype):
    made = torch.Generator().manual_seed(groups)
    s = torch.randn(5, groups, 128, generator=made).to(dtype)
    theirs = marlin_utils.marlin_moe_permute_scales(s, size_k=groups * 128, size_n=128, group_size=128)
    assert torch.equal(vllm_experts.permute_scales(s, groups * 128, 128, 128), theirs)
    strided = torch.cat([s, s], -1)[..., :128]
    assert torch.equal(vllm_experts.permute_scales(strided, groups * 128, 128, 128), theirs)


def test_a_wrong_size_does_not_choose_the_permutation():
    """vLLM gives gate and up the intermediate size: 128 for experts of hidden size 256, hence two groups of 128."""
    s = torch.randn(3, 2, 128).bfloat16()
    right = marlin_utils.marlin_moe_permute_scales(s, size_k=256, size_n=128, group_size=128)
    assert not torch.equal(marlin_utils.marlin_moe_permute_scales(s, size_k=128, size_n=128, group_size=128), right)
    assert torch.equal(vllm_experts.permute_scales(s, 128, 128, 128), right)


class Tiles:
    """Stands for the kernel: moves words within tiles of 2 packed rows (16 of 4 bits), and gives a tile a row."""

    calls = 0

    def gptq_marlin_repack(self, weight, perm, size_k, size_n, num_bits, is_a_8bit):
        self.calls += 1
        assert weight.shape == (size_k * num_bits // 32, size_n) and not perm.numel()
        return weight.view(size_k // 16, 2, size_n).flip(1).reshape(size_k // 16, -1)


@pytest.fixture
def tiles(monkeypatch):
    tiles = Tiles()
    monkeypatch.setattr(torch.ops, "_C", tiles, raising=False)
    monkeypatch.setattr(vllm_experts, "_checked", set())
    return tiles


def test_one_call_packs_all_experts(tiles):
    weight = torch.randint(-(2**31), 2**31 - 1, (6, 8, 64), dtype=torch.int32)
    perm = torch.empty(6, 0, dtype=torch.int32)
    packed = vllm_experts.repack(weight, perm, 64, 64, 4)
    assert tiles.calls == 3  # and the proof, on two of them
    alone = torch.stack([tiles.gptq_marlin_repack(weight[e], perm[e], 64, 64, 4, False) for e in range(6)])
    assert packed.shape == (6, 4, 128) and torch.equal(packed, alone)
    before = tiles.calls
    vllm_experts.repack(weight.flip(0), perm, 64, 64, 4)
    assert tiles.calls == before + 1


def test_experts_that_do_not_pack_alike_are_refused(tiles, monkeypatch):
    def across(weight, perm, size_k, size_n, num_bits, is_a_8bit):
        return weight.flip(0).reshape(size_k // 16, -1)

    monkeypatch.setattr(tiles, "gptq_marlin_repack", across, raising=False)
    with pytest.raises(RuntimeError, match="expert 0 of 6"):
        vllm_experts.repack(torch.arange(6 * 8 * 64, dtype=torch.int32).view(6, 8, 64), torch.empty(6, 0), 64, 64, 4)


def test_vllm_has_what_is_replaced():
    int_wna16 = pytest.importorskip("vllm.model_executor.layers.fused_moe.oracle.int_wna16")
    from vllm import _custom_ops

    assert callable(int_wna16.marlin_moe_permute_scales) and callable(_custom_ops.gptq_marlin_moe_repack)


@pytest.fixture
def replaced(monkeypatch):
    """Whether vLLM's two functions are ours, from a state in which they are not; undone afterwards."""
    int_wna16 = pytest.importorskip("vllm.model_executor.layers.fused_moe.oracle.int_wna16")
    from vllm import _custom_ops

    monkeypatch.setattr(int_wna16, "marlin_moe_permute_scales", None)
    monkeypatch.setattr(_custom_ops, "gptq_marlin_moe_repack", None)
    ours = vllm_experts.permute_scales, vllm_experts.repack
    return lambda: (int_wna16.marlin_moe_permute_scales, _custom_ops.gptq_marlin_moe_repack) == ours


@pytest.fixture
def register(replaced, monkeypatch):
    """The plugin's registration, as on a platform ("cuda", "cpu", ..)."""
    from vllm.platforms import current_platform

    from qarl_openrlhf.engine import plugin

    def registered(platform):
        with monkeypatch.context() as faked:
            if platform != "cpu":  # the machine's own, elsewhere
                faked.setattr("qarl_openrlhf.patches.versions.version", lambda package: "0.26.0")
            for name in ("cpu", "cuda"):
                faked.setattr(type(current_platform), f"is_{name}", lambda self, name=name: name == platform)
            plugin.register()

    return registered


def test_the_plugin_mends_what_only_loads_an_export(register, replaced):
    """A GPU process of vLLM that nothing is pushed to: cli.evaluate, `vllm serve`."""
    register("cuda")
    assert replaced()
    register("cuda")
    assert replaced()


@pytest.mark.parametrize("platform", ["cpu", "rocm"])
def test_elsewhere_nothing_is_replaced(register, replaced, platform):
    from vllm.platforms import current_platform

    if platform == "cpu" and not current_platform.is_cpu():
        pytest.skip("needs vLLM for CPUs")
    register(platform)
    assert not replaced()


@pytest.mark.parametrize("any_version", [True, False])
def test_a_vllm_without_such_experts_is_refused_unless_any_is_taken(register, monkeypatch, any_version):
    monkeypatch.setenv("QARL_ANY_VLLM", str(int(any_version)))

    def missing():
        raise ImportError("cannot import name 'int_wna16'")

    monkeypatch.setattr(vllm_experts, "apply", missing)
    if any_version:
        register("cuda")
    else:
        with pytest.raises(ImportError, match="int_wna16"):
            register("cuda")
