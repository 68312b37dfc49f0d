"""vLLM's own kernels and ours bring W4A8 weights and scales into the same layout, byte for byte."""

import pytest
import torch

from qarl_openrlhf.patches import vllm_w4a8

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="W4A8 runs on Hopper"
)


@pytest.fixture(scope="module")
def vllms():
    pytest.importorskip("vllm._custom_ops")
    return torch.ops._C


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))


@pytest.mark.parametrize("n, k", [(128, 128), (128, 256), (384, 896), (6144, 4096), (4096, 12288), (24576, 4096)])
def test_a_weight(vllms, n, k):
    b = codes(n, k // 8).t()
    ours, theirs = vllm_w4a8.reorder(b), vllms.cutlass_encode_and_reorder_int4b(b)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert vllm_w4a8._alike(b.device)


@pytest.mark.parametrize("experts, n, k", [(1, 256, 256), (8, 512, 256), (5, 256, 768), (128, 1536, 2048), (128, 2048, 768)])
def test_experts(vllms, experts, n, k):
    b = codes(experts, n, k // 8)
    for ours, theirs in zip(vllm_w4a8.reorder_experts(b), vllms.cutlass_encode_and_reorder_int4b_grouped(b), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype


@pytest.mark.parametrize("shape", [(1,), (32, 6144), (128, 16, 1536)])
def test_scales(vllms, shape):
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    scales = every[torch.randint(256, shape, device="cuda")].view(torch.float8_e4m3fn)
    ours, theirs = vllm_w4a8.pack_scales(scales), vllms.cutlass_pack_scale_fp8(scales)
    assert ours.shape == theirs.shape and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_signed_codes():
    """By definition: vLLM's own function may be ours already in this process."""
    stored = codes(64, 32)
    signed = vllm_w4a8.make_signed(stored.clone())
    for shift in range(0, 32, 4):
        assert torch.equal(signed >> shift & 15, (stored >> shift & 15) - 8 & 15)
