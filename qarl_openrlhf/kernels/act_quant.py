"""Per-token activation quantization, bit-equal with vLLM's ``scaled_int8_quant`` and ``scaled_fp8_quant``.

    int8   scale = amax / 127                      code = round_half_even(x * (127 / amax))
    fp8    scale = max(amax / 448, 1 / (448*512))  code = e4m3(x / scale), saturating

The fp8 quotient must round as a division does: a plain reciprocal would move ties. Bound by memory: one read of the
row, which stays in registers, 3 bytes of traffic a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.quantize_pack import row_launch
from qarl_openrlhf.kernels.rounding import MAGIC, absmax, divide_bf16, larger, to_e4m3, widen


@triton.jit
def _float(x):
    return widen(x) if x.dtype == tl.bfloat16 else x.to(tl.float32)


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
def _kernel(x, codes, scales, stride, K: tl.constexpr, CHUNK: tl.constexpr, FP8: tl.constexpr):
    """One row, held in registers as a tuple of chunks."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    chunks = ()
    largest = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in tl.static_range(0, K, CHUNK):
        value = tl.load(x + row * stride + start + column, mask=start + column < K, other=0.0)
        largest = larger(largest, tl.abs(_float(value)))
        chunks = chunks + (value,)
    scale, factor = _scales(absmax(largest, 0), FP8)
    tl.store(scales + row, scale)
    for i in tl.static_range(len(chunks)):
        code = _codes(_float(chunks[i]), factor, FP8, x.dtype.element_ty == tl.bfloat16)
        tl.store(codes + row * K + i * CHUNK + column, code, mask=i * CHUNK + column < K)


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
        chunk, warps = row_launch(k)
        stored = codes.view(torch.uint8) if fp8 else codes
        _kernel[(rows.shape[0],)](rows, stored, scales, rows.stride(0), k, chunk, fp8, num_warps=warps)
    return codes, scales
