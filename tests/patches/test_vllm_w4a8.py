"""W4A8 weights in CUTLASS's layout: the order by its definition, code by code, and vLLM's own where it is another one.

That the bytes are vLLM's on a card: tests/gpu/test_w4a8_layout.py.
"""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_openrlhf.patches import vllm_w4a8


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] codes, of which the low four bits count -> int32 [..., K / 8]."""
    words = ((codes & 15).unflatten(-1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def by_definition(signed: torch.Tensor) -> torch.Tensor:
    """Signed codes [N, K] -> flat [N * K] as the kernel reads them: CuTe's layouts, one code at a time.

    Hopper's operand of 64 x 32 8-bit values: value (v0, v1, v2) of thread (t0, t1) of warp w is row t1 + 8 v1 + 16 w, column
    4 t0 + v0 + 16 v2. A warp's 16 values of 32 threads follow each other; tiles go along N first.
    """
    n, k = signed.shape
    out = torch.empty(n * k, dtype=torch.long)
    for row in range(n):
        for column in range(k):
            code = int(signed[row, column])
            v0, t0, v2 = column % 4, column // 4 % 4, column // 16 % 2
            t1, v1 = row % 8, row // 8 % 2
            tile = row // 16 + n // 16 * (column // 32)
            out[tile * 512 + (t0 + 4 * t1) * 16 + v0 + 4 * v1 + 8 * v2] = 8 - code if code > 0 else code
    return out


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_the_order_of_the_codes(experts, tiles_n, tiles_k, seed):
    signed = torch.randint(-8, 8, (experts, 16 * tiles_n, 32 * tiles_k), generator=torch.Generator().manual_seed(seed))
    packed = pack(signed)
    before = packed.clone()
    ours = vllm_w4a8.in_kernel_order(packed)
    assert torch.equal(packed, before)
    assert torch.equal(ours, torch.stack([pack(by_definition(one)) for one in signed]).view_as(packed))


def test_codes_are_made_signed_in_place():
    codes = torch.arange(16).repeat(4)
    stored = pack(codes)
    assert vllm_w4a8.make_signed(stored) is stored
    assert torch.equal(stored, pack(codes - 8))


class Kernels:
    """vLLM's compiled functions, by their definition."""

    grouped = 0

    def cutlass_pack_scale_fp8(self, scales):
        assert scales.is_contiguous()
        return (scales.flatten().float()[:, None] * torch.arange(-8, 0)).to(scales.dtype).flatten()

    def cutlass_encode_and_reorder_int4b(self, b):
        signed = ((b.t()[..., None] >> (4 * torch.arange(8)) & 15) ^ 8).flatten(-2) - 8
        return pack(by_definition(signed)).view(b.shape[1], b.shape[0]).t()

    def cutlass_encode_and_reorder_int4b_grouped(self, b):
        self.grouped += len(b)
        return torch.stack([self.cutlass_encode_and_reorder_int4b(one.t()).t() for one in b]), torch.tensor([[b.shape[1], 7]]).repeat(len(b), 1)


@pytest.fixture
def kernels(monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(torch.ops, "_C", kernels, raising=False)
    for name in ("_multiples", "_alike", "_layout"):  # what a process asks once
        monkeypatch.setattr(vllm_w4a8, name, cache(getattr(vllm_w4a8, name).__wrapped__))
    return kernels


def test_scales_become_their_multiples(kernels):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = every[torch.randperm(256, generator=torch.Generator().manual_seed(0))].view(2, 8, 16)
    packed = vllm_w4a8.pack_scales(scales)
    assert packed.dtype == scales.dtype
    assert torch.equal(packed.view(torch.uint8), kernels.cutlass_pack_scale_fp8(scales).view(torch.uint8))
    turned = scales.transpose(1, 2)  # vLLM makes it contiguous first; so does flatten
    assert torch.equal(vllm_w4a8.pack_scales(turned).view(torch.uint8), vllm_w4a8.pack_scales(turned.contiguous()).view(torch.uint8))


def test_a_weight_and_experts_are_reordered_as_vllm_does(kernels):
    experts = torch.randint(-(2**31), 2**31 - 1, (3, 32, 8), dtype=torch.int32)
    b = experts[0].t()
    ours, theirs = vllm_w4a8.reorder(b), kernels.cutlass_encode_and_reorder_int4b(b)
    assert torch.equal(ours, theirs) and ours.shape == b.shape and ours.stride() == theirs.stride()
    before = kernels.grouped
    ours, layout = vllm_w4a8.reorder_experts(experts)
    vllm_w4a8.reorder_experts(experts)
    assert kernels.grouped == before + 1  # for one expert's layout, once
    theirs, their_layout = kernels.cutlass_encode_and_reorder_int4b_grouped(experts)
    assert torch.equal(ours, theirs) and torch.equal(layout, their_layout)


@pytest.mark.parametrize("other", ["cutlass_encode_and_reorder_int4b", "cutlass_encode_and_reorder_int4b_grouped"])
def test_another_order_is_left_to_vllm(kernels, monkeypatch, caplog, other):
    """A version whose kernel reads other bytes: its own functions are called, and a line says so once."""
    theirs = getattr(kernels, other)
    turned = lambda b: theirs(b.flip(-1)) if b.dim() == 3 else theirs(b.flip(0))  # noqa: E731
    monkeypatch.setattr(kernels, other, turned, raising=False)
    experts = torch.randint(-(2**31), 2**31 - 1, (3, 32, 8), dtype=torch.int32)
    for _ in range(2):
        assert torch.equal(vllm_w4a8.reorder(experts[0].t()), kernels.cutlass_encode_and_reorder_int4b(experts[0].t()))
        assert torch.equal(vllm_w4a8.reorder_experts(experts)[0], kernels.cutlass_encode_and_reorder_int4b_grouped(experts)[0])
    assert caplog.text.count("reorders them itself") == 1


@pytest.mark.parametrize("platform, replaced", [("cuda", True), ("cpu", False)])
def test_the_plugin_replaces_vllms_on_cards_only(monkeypatch, platform, replaced):
    ops = pytest.importorskip("vllm._custom_ops")
    cutlass = pytest.importorskip("vllm.model_executor.kernels.linear.mixed_precision.cutlass")
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.platforms import current_platform

    from qarl_openrlhf.patches import versions, vllm

    ours = {
        (ops, "cutlass_pack_scale_fp8"): vllm_w4a8.pack_scales,
        (ops, "cutlass_encode_and_reorder_int4b"): vllm_w4a8.reorder,
        (ops, "cutlass_encode_and_reorder_int4b_grouped"): vllm_w4a8.reorder_experts,
        (quant_utils, "convert_packed_uint4b8_to_signed_int4_inplace"): vllm_w4a8.make_signed,
        (cutlass, "convert_packed_uint4b8_to_signed_int4_inplace"): vllm_w4a8.make_signed,
    }
    for owner, name in ours:
        monkeypatch.setattr(owner, name, None)
    monkeypatch.setattr(vllm, "vllm_experts", SimpleNamespace(apply=lambda: None))
    for cpu_patch in ("_one_random_number_a_token", "_no_draw_before_the_prompt_is_read", "_experts_of_a_token"):
        monkeypatch.setattr(vllm, cpu_patch, lambda: None)
    if platform == "cuda":
        monkeypatch.setattr(versions, "version", lambda package: "0.26.0")
    elif not current_platform.is_cpu():
        pytest.skip("needs vLLM for CPUs")
    for name in ("cpu", "cuda"):
        monkeypatch.setattr(type(current_platform), f"is_{name}", lambda self, name=name: name == platform)
    vllm.apply()
    assert [getattr(owner, name) is new for (owner, name), new in ours.items()] == [replaced] * len(ours)
