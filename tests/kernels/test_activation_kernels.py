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


@pytest.mark.parametrize("case", list(cases(9, 384)))
@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
def test_hard_activations(fp8, case, device):
    check(cases(9, 384)[case], fp8, device)


@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_and_layouts(fp8, dtype, device):
    x = torch.randn(2, 5, 800).to(dtype)
    check(x[..., 100:676], fp8, device)  # rows with a stride
    check(x.transpose(-1, -2), fp8, device)  # columns not contiguous
    check(x[:, :0], fp8, device)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("k", [576, 1536, 4096, 8960, 12288, 18944, 32768])
def test_real_widths(fp8, k, device):
    check((torch.randn(333, k) * torch.exp(2 * torch.randn(333, 1))).bfloat16(), fp8, device)


@pytest.mark.gpu
def test_many_quotients_round_as_a_division(device):
    """Codes next to e4m3's rounding ties: x is a tie times the scale, give or take an ulp of BF16."""
    x = torch.randn(4096, 4096).bfloat16()
    scale = x.float().abs().amax(-1, keepdim=True) / 448.0
    ties = (torch.randint(8, 16, x.shape) + 0.5) * 2.0 ** torch.randint(-6, 5, x.shape)
    near = (ties * scale).clamp(max=400 * scale).bfloat16()
    near[:, 0] = x.abs().amax(-1)
    check(near, True, device)


def test_nan_is_not_swallowed(device):
    x = torch.randn(4, 64).bfloat16()
    x[2, 7] = float("nan")
    for fp8 in (False, True):
        _, scale = act_quant.act_quant(x.to(device), fp8)
        assert torch.isnan(scale.cpu()[:, 0]).tolist() == [False, False, True, False]
