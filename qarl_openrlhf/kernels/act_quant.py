"""Per-token activation quantization, bit-equal with vLLM's ``scaled_int8_quant`` and ``scaled_fp8_quant``.

    int8   scale = amax / 127                      code = round_half_even(x * (127 / amax))
    fp8    scale = max(amax / 448, 1 / (448*512))  code = e4m3(x / scale), saturating

A true division for each fp8 value: x / scale has no short significand, so a reciprocal would change codes. One read of the
row, which stays in registers: 3 bytes of traffic a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.rounding import MAGIC, absmax, to_e4m3, widen


@triton.jit
def _kernel(
    x, codes, scales, rows, stride, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < K)
    value = tl.load(x + row[:, None] * stride + column, mask=inside, other=0.0)
    value = widen(value) if x.dtype.element_ty == tl.bfloat16 else value.to(tl.float32)
    amax = absmax(value, 1)
    if FP8:
        scale = tl.maximum(tl.div_rn(amax, 448.0), 1.0 / (448.0 * 512.0), propagate_nan=tl.PropagateNan.ALL)
        code, _ = to_e4m3(tl.div_rn(value, scale[:, None] + tl.zeros_like(value)))
    else:
        scale = tl.div_rn(amax, 127.0)
        inverse = tl.where(amax == 0.0, 0.0, tl.div_rn(127.0, amax))
        # Clamping between product and sum also keeps the compiler from fusing them into one rounding.
        product = value * inverse[:, None]
        product = tl.where(product == product, product, 0.0)  # 0 * inf, if amax is denormal; the hardware cast gives 0
        rounded = tl.minimum(tl.maximum(product, -128.0), 127.0) + MAGIC
        code = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(scales + row, scale, mask=row < rows)
    tl.store(codes + row[:, None] * K + column, code, mask=inside)


def _outputs(x: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn if fp8 else torch.int8, device=x.device)
    return codes, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


@op("act_quant(Tensor x, bool fp8) -> (Tensor, Tensor)", _outputs)
def act_quant(x: Tensor, fp8: bool):
    """``[..., K]`` (BF16, FP16 or FP32; K at most 32768) -> (int8 or e4m3 codes, float32 scale ``[..., 1]``)."""
    codes, scales = _outputs(x, fp8)
    k = x.shape[-1]
    if codes.numel():
        rows = x.reshape(-1, k)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        block = triton.next_power_of_2(k)
        per_program = max(1, 2048 // block)
        warps = min(max(block * per_program // 1024, 1), 16)
        grid = (triton.cdiv(rows.shape[0], per_program),)
        _kernel[grid](
            rows, codes.view(torch.uint8) if fp8 else codes, scales, rows.shape[0], rows.stride(0), k, block, per_program,
            fp8, num_warps=warps,
        )  # fmt: skip
    return codes, scales
