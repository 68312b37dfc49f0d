"""Per-token activation quantization, bit-equal with vLLM's ``scaled_int8_quant`` and ``scaled_fp8_quant``.

    int8   scale = amax / 127                      code = round_half_even(x * (127 / amax))
    fp8    scale = max(amax / 448, 1 / (448*512))  code = e4m3(x / scale), saturating

The fp8 quotient must round as a division does: a plain reciprocal would move ties. Bound by memory, 3 bytes a value: rows up
to ROW stay in registers, longer ones are read a second time from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.rounding import MAGIC, absmax, divide_bf16, larger, to_e4m3, widen


ROW = 4096


@triton.jit
def _load(x, at, mask):
    value = tl.load(x + at, mask=mask, other=0.0)
    return widen(value) if x.dtype.element_ty == tl.bfloat16 else value.to(tl.float32)


@triton.jit
def _scales(amax, FP8: tl.constexpr):
    """(what is stored, what a value is divided or multiplied by)."""
    if FP8:
        scale = tl.maximum(tl.div_rn(amax, 448.0), 1.0 / (448.0 * 512.0), propagate_nan=tl.PropagateNan.ALL)
        return scale, scale
    return tl.div_rn(amax, 127.0), tl.where(amax == 0.0, 0.0, tl.div_rn(127.0, amax))


@triton.jit
def _codes(value, factor, FP8: tl.constexpr, BF16: tl.constexpr):
    if FP8:
        quotient = divide_bf16(value, factor) if BF16 else tl.div_rn(value, factor + tl.zeros_like(value))
        code, _ = to_e4m3(quotient)
    else:
        product = value * factor
        product = tl.where(product == product, product, 0.0)  # 0 * inf, if amax is denormal; the hardware cast gives 0
        # Clamping between product and sum also keeps the compiler from fusing them into one rounding.
        rounded = tl.minimum(tl.maximum(product, -128.0), 127.0) + MAGIC
        code = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    return code


@triton.jit
def _kernel(
    x, codes, scales, rows, stride, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    bf16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    if K <= BLOCK:
        inside = (row < rows)[:, None] & (column < K)
        value = _load(x, row[:, None] * stride + column, inside)
        scale, factor = _scales(absmax(value, 1), FP8)
        tl.store(codes + row[:, None] * K + column, _codes(value, factor[:, None], FP8, bf16), mask=inside)
    else:
        largest = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(0, K, BLOCK):
            inside = (row < rows)[:, None] & (start + column < K)
            largest = larger(largest, tl.abs(_load(x, row[:, None] * stride + start + column, inside)))
        scale, factor = _scales(absmax(largest, 1), FP8)
        for start in range(0, K, BLOCK):
            inside = (row < rows)[:, None] & (start + column < K)
            value = _load(x, row[:, None] * stride + start + column, inside)
            code = _codes(value, factor[:, None], FP8, bf16)
            tl.store(codes + row[:, None] * K + start + column, code, mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


def _outputs(x: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn if fp8 else torch.int8, device=x.device)
    return codes, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


@op("act_quant(Tensor x, bool fp8) -> (Tensor, Tensor)", _outputs)
def act_quant(x: Tensor, fp8: bool):
    """``[..., K]`` (BF16, FP16 or FP32) -> (int8 or e4m3 codes, float32 scale ``[..., 1]``)."""
    codes, scales = _outputs(x, fp8)
    k = x.shape[-1]
    if codes.numel():
        rows = x.reshape(-1, k)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        block = min(triton.next_power_of_2(k), ROW)
        per_program = max(1, 2048 // block)
        warps = min(max(block * per_program // 1024, 1), 16)
        grid = (triton.cdiv(rows.shape[0], per_program),)
        _kernel[grid](
            rows, codes.view(torch.uint8) if fp8 else codes, scales, rows.shape[0], rows.stride(0), k, block, per_program,
            fp8, num_warps=warps,
        )  # fmt: skip
    return codes, scales
