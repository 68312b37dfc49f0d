"""vLLM 0.26 to 0.29 on a GPU: W4A8 weights and scales into CUTLASS's layout, on the GPU and all experts at once.

A push brings every layer into the kernel's layout. The kernel looks a code up among eight multiples of its group's scale, and vLLM
writes these out in a loop on the host: 54 million scales of Qwen3-8B, most of the 3.7 s that loading them took. It also goes through a
weight forty times to turn codes into signed ones, and reorders it with an allocation and a wait of its own, expert by expert. Here
each is a few launches a tensor, with the same bytes: the multiples come from a table of vLLM's own, the order is proven
against vLLM's the first time, and vLLM's is kept where it is another one.

Applied by the plugin (:mod:`qarl_openrlhf.patches.vllm`): exports are loaded without any push.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from qarl_openrlhf.patches.replacing import replace

_log = logging.getLogger(__name__)
_SIGNS = 0x88888888 - 2**32  # the sign bits of eight codes, as an int32


def apply() -> None:
    """Before a process of vLLM's loads or is pushed W4A8 weights. Any number of times."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.mixed_precision import cutlass
    from vllm.model_executor.layers.quantization.utils import quant_utils

    replace(_custom_ops, "cutlass_pack_scale_fp8", pack_scales)
    replace(_custom_ops, "cutlass_encode_and_reorder_int4b", reorder)
    replace(_custom_ops, "cutlass_encode_and_reorder_int4b_grouped", reorder_experts)
    for module in (quant_utils, cutlass):
        replace(module, "convert_packed_uint4b8_to_signed_int4_inplace", make_signed)


def pack_scales(scales: Tensor) -> Tensor:
    """In ``cutlass_pack_scale_fp8``'s signature: e4m3 of any shape -> e4m3 [8 * size], the scale times -8 .. -1 of each."""
    return _multiples(scales.device)[scales.flatten().view(torch.uint8).int()].view(scales.dtype)


@cache
def _multiples(device: torch.device) -> Tensor:
    """int64 [256]: the eight bytes that vLLM makes of each e4m3 byte."""
    every = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return torch.ops._C.cutlass_pack_scale_fp8(every).view(torch.int64)


def make_signed(t: Tensor) -> Tensor:
    """In ``convert_packed_uint4b8_to_signed_int4_inplace``'s signature: codes 0 .. 15 become -8 .. 7 in two's complement."""
    return t.bitwise_xor_(_SIGNS)


def reorder(b: Tensor) -> Tensor:
    """In ``cutlass_encode_and_reorder_int4b``'s signature: int32 [K / 8, N], a column contiguous, of signed codes."""
    if not (_alike(b.device) and b.t().is_contiguous()):
        return torch.ops._C.cutlass_encode_and_reorder_int4b(b)
    return in_kernel_order(b.t()[None])[0].t()


def reorder_experts(b_tensors: Tensor) -> tuple[Tensor, Tensor]:
    """In ``cutlass_encode_and_reorder_int4b_grouped``'s signature: int32 [E, N, K / 8] -> (the same reordered, a layout an expert)."""
    if not _alike(b_tensors.device):
        return torch.ops._C.cutlass_encode_and_reorder_int4b_grouped(b_tensors)
    experts, n, words = b_tensors.shape
    layout = _layout(b_tensors.device, n, words)
    return in_kernel_order(b_tensors), layout.repeat(experts, 1)


@cache
def _layout(device: torch.device, n: int, words: int) -> Tensor:
    """int32 [1, ...]: vLLM's description of an expert's layout, which only its size decides; with vLLM's checks of that size."""
    one = torch.zeros(1, n, words, dtype=torch.int32, device=device)
    return torch.ops._C.cutlass_encode_and_reorder_int4b_grouped(one)[1]


def in_kernel_order(weight: Tensor) -> Tensor:
    """int32 [E, N, K / 8] of signed codes -> the same shape: codes encoded as the kernel reads them, in its order.

    Encoded: the kernel unifies k and -k but for the sign, 1 .. 7 become 7 .. 1. The order: a thread of Hopper's 64 x 32 FP8 operand
    holds 16 codes, 4 neighbours of K in rows 8 apart, 16 apart along K; a warp's 16 x 32 codes follow each other thread by thread,
    such tiles along N, then along K (CUTLASS's compute_memory_reordering_atom).
    """
    experts, n, words = weight.shape
    magnitude = weight & ~_SIGNS
    negative = ((weight >> 3) & 0x11111111).mul_(7)  # three ones where the sign is set
    opposite = (_SIGNS - magnitude).bitwise_and_(~_SIGNS)
    encoded = opposite.bitwise_xor_(magnitude.bitwise_xor_(opposite).bitwise_and_(negative)).bitwise_or_(weight & _SIGNS)
    quads = encoded.view(torch.int16).view(experts, n // 16, 2, 8, words // 4, 2, 4)  # e, tile n, 8 rows on, row, tile k, 16 columns on, 4 columns
    return quads.permute(0, 4, 1, 3, 6, 5, 2).reshape(experts, n, 2 * words).view(torch.int32)


@cache
def _alike(device: torch.device) -> bool:
    """Whether vLLM's own functions give the bytes of :func:`in_kernel_order`, asked once of a process."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randint(-(2**31), 2**31 - 1, (2, 176, 96), generator=made, dtype=torch.int32).to(device)
    ours = in_kernel_order(weight)
    one = torch.ops._C.cutlass_encode_and_reorder_int4b(weight[0].t())
    both, _ = torch.ops._C.cutlass_encode_and_reorder_int4b_grouped(weight)
    alike = one.stride() == (1, 96) and torch.equal(one.t(), ours[0]) and torch.equal(both, ours)
    if not alike:
        _log.warning("vLLM's layout of W4A8 weights is not the one that %s knows: it reorders them itself, which takes longer", __name__)
    return alike
