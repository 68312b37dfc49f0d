"""8-bit product with the scales and the bias in its epilogue: y = bf16(x_scale * (w_scale * (x_q @ w_q^T)) + bias).

INT8 sums are exact integers, so the result equals the torch reference bit for bit; FP8 sums are float32 in the tensor
core's order. Bound by arithmetic for M above a few hundred. Persistent: one program an SM walks over output tiles, operand
tiles come through TMA. torch._int_mm writes int32 and needs a second pass over [M, N] for the scales; this does not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.rounding import narrow, widen
from qarl_openrlhf.kernels.tune import Config, bucket, tuned


@triton.jit
def _kernel(
    x, w, y, x_scale, w_scale, bias, M, N, K, PROGRAMS, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BAND: tl.constexpr, SPLIT_N: tl.constexpr, INT8: tl.constexpr, HAS_BIAS: tl.constexpr, LATE_BIAS: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=False):
        # Walk bands of BAND tile rows, so that programs running at the same time share operand tiles in L2.
        band = tile // (BAND * across)
        height = min(down - band * BAND, BAND)
        m = (band * BAND + (tile % (BAND * across)) % height) * BM
        n = ((tile % (BAND * across)) // height) * BN
        total = tl.zeros((BM, BN), dtype=tl.int32 if INT8 else tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(x.load([m, k]), w.load([n, k]).T, total, out_dtype=tl.int32 if INT8 else tl.float32)
        row = m + tl.arange(0, BM)
        row_scale = tl.load(x_scale + row, mask=row < M, other=0.0)[:, None]
        if SPLIT_N == 1:
            _epilogue(total, row, n, row_scale, y, w_scale, bias, M, N, BN, HAS_BIAS, LATE_BIAS)
        else:
            halves = tl.permute(tl.reshape(total, BM, 2, BN // 2), 0, 2, 1)
            left, right = tl.split(halves)
            _epilogue(left, row, n, row_scale, y, w_scale, bias, M, N, BN // 2, HAS_BIAS, LATE_BIAS)
            _epilogue(right, row, n + BN // 2, row_scale, y, w_scale, bias, M, N, BN // 2, HAS_BIAS, LATE_BIAS)


@triton.jit
def _epilogue(
    total, row, n, row_scale, y, w_scale, bias, M, N, BN: tl.constexpr, HAS_BIAS: tl.constexpr, LATE_BIAS: tl.constexpr
):
    column = n + tl.arange(0, BN)
    inside = column < N
    channel = tl.load(w_scale + column, mask=inside, other=0.0)[None, :]
    result = row_scale * (channel * total.to(tl.float32))
    if HAS_BIAS:
        shift = widen(tl.load(bias + column, mask=inside, other=0.0))[None, :]
        if LATE_BIAS:  # vLLM's W4A8 kernel rounds before it adds the bias
            result = widen(narrow(result))
        result += shift
    at = row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(y + at, narrow(result), mask=(row < M)[:, None] & inside[None, :])


# (BM, BN, BK, BAND, SPLIT_N), warps, stages
CONFIGS = [
    Config((64, 128, 128, 8, 1), 4, 4),
    Config((128, 128, 128, 8, 1), 4, 4),
    Config((128, 128, 128, 8, 1), 8, 4),
    Config((128, 256, 128, 8, 1), 8, 3),
    Config((128, 256, 128, 8, 2), 8, 4),
    Config((256, 128, 128, 8, 1), 8, 3),
    Config((256, 128, 128, 8, 2), 8, 4),
]


def _output(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, late_bias: bool) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=torch.bfloat16, device=x.device)


@op(
    "w8a8_gemm(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, bool late_bias) -> Tensor",
    _output,
)
def w8a8_gemm(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, late_bias: bool) -> Tensor:
    """int8 or e4m3 ``x [M, K]``, float32 ``[M, 1]``; ``w [N, K]`` of the same type, float32 ``[N, 1]`` -> BF16 ``[M, N]``.

    Any M and N; K a multiple of 16 (TMA rows). late_bias: round to BF16 before adding the bias.
    """
    y = _output(x, x_scale, w, w_scale, bias, late_bias)
    (m, k), n = x.shape, w.shape[0]
    if k % 16:
        raise ValueError(f"w8a8_gemm needs input features in multiples of 16, not {k}")
    if y.numel() == 0:
        return y
    x, w = x.contiguous(), w.contiguous()
    int8 = x.dtype == torch.int8
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4

    def launch(config: Config) -> None:
        bm, bn, bk, band, split_n = config.sizes
        tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
        _kernel[(min(programs, tiles),)](
            TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(w, [bn, bk]),
            y, x_scale, w_scale, bias, m, n, k, min(programs, tiles), bm, bn, bk, band, split_n, int8, bias is not None,
            late_bias, num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
        )  # fmt: skip

    launch(tuned("w8a8_gemm", (x.dtype, bucket(m), n, k), CONFIGS, launch))
    return y
