"""act_quant: bit-equal with vLLM's arithmetic, written down in kernels/reference.py."""

import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))

from hard_weights import cases  # noqa: E402
from qarl_openrlhf.kernels import act_quant, reference  # noqa: E402

REFERENCE = {False: reference.quantize_act_int8, True: reference.quantize_act_fp8}


def check(x, fp8, device):
    codes, scale = act_quant.act_quant(x.to(device), fp8)
    expected, expected_scale = REFERENCE[fp8](x.cpu())
    assert scale.dtype == torch.float32 and torch.equal(scale.cpu(), expected_scale)
    assert codes.shape == x.shape and codes.dtype == expected.dtype
    assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
def test_hard_activations(fp8, device):
    for x in cases(5, 384).values():
        check(x, fp8, device)


@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_and_layouts(fp8, dtype, device):
    x = torch.randn(2, 3, 400).to(dtype)
    check(x[..., 50:338], fp8, device)  # rows with a stride
    check(x.transpose(-1, -2)[:, :4], fp8, device)  # columns not contiguous
    check(x[:, :0], fp8, device)


@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
def test_rows_in_several_chunks(fp8, device):
    check(torch.randn(3, 4600).bfloat16(), fp8, device)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("k", [576, 1536, 4096, 8960, 12288, 18944, 32768])
def test_real_widths(fp8, k, device):
    check((torch.randn(70, k) * torch.exp(2 * torch.randn(70, 1))).bfloat16(), fp8, device)


@pytest.mark.gpu
def test_every_quotient_rounds_as_a_division(device):
    """All pairs of significands of a BF16 value and of its row's maximum, over e4m3's whole range of exponents."""
    amax = torch.arange(128, 256).float()[:, None]
    values = torch.arange(128, 256).float() * 2.0 ** -torch.arange(1, 20).float()[:, None]
    x = torch.cat([amax, values.flatten()[None].expand(128, -1)], 1)
    assert torch.equal(x.bfloat16().float(), x)
    check(x.bfloat16(), True, device)
    check(-x.bfloat16(), True, device)


def test_nan_is_not_swallowed(device):
    x = torch.randn(4, 64).bfloat16()
    x[2, 7] = float("nan")
    for fp8 in (False, True):
        _, scale = act_quant.act_quant(x.to(device), fp8)
        assert torch.isnan(scale.cpu()[:, 0]).tolist() == [False, False, True, False]
