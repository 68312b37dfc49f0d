"""w8a8_gemm for all experts of a MoE layer at once: rows sorted by expert, one weight matrix each.

Which rows are whose is known on the device only (``ends``), so every program works out for itself where its tiles lie: tiles
of an expert never cross into the next one's rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.rounding import narrow
from qarl_openrlhf.kernels.tune import Config, bucket, tuned


@triton.jit
def _kernel(
    x, w, y, x_scale, w_scale, ends, N, K, PROGRAMS, E: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, EXPERTS)
    end = tl.load(ends + index, mask=index < E, other=0)
    begin = tl.load(ends + index - 1, mask=(index > 0) & (index < E), other=0)
    tiles = tl.where(index < E, tl.cdiv(end - begin, BM), 0)
    before = tl.cumsum(tiles, 0) - tiles  # tile rows of earlier experts
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles) * across, PROGRAMS):
        down = tile // across
        n = (tile % across) * BN
        mine = (before <= down) & (down < before + tiles)
        expert = tl.sum(tl.where(mine, index, 0))
        m = tl.sum(tl.where(mine, begin + (down - before) * BM, 0))
        stop = tl.sum(tl.where(mine, end, 0))
        total = tl.zeros((BM, BN), dtype=tl.int32 if INT8 else tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(
                x.load([m, k]), w.load([expert * N + n, k]).T, total, out_dtype=tl.int32 if INT8 else tl.float32
            )
        row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
        row_scale = tl.load(x_scale + row, mask=row < stop, other=0.0)[:, None]
        channel = tl.load(w_scale + expert * N + column, mask=column < N, other=0.0)[None, :]
        at = row[:, None].to(tl.int64) * N + column[None, :]
        inside = (row < stop)[:, None] & (column < N)[None, :]
        tl.store(y + at, narrow(row_scale * (channel * total.to(tl.float32))), mask=inside)


# (BM, BN, BK), warps, stages
CONFIGS = [
    Config((64, 128, 128), 4, 4),
    Config((128, 128, 128), 4, 4),
    Config((128, 128, 128), 8, 4),
    Config((128, 256, 128), 8, 3),
    Config((64, 256, 128), 8, 4),
]


def _output(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor) -> Tensor:
    return torch.empty((x.shape[0], w.shape[1]), dtype=torch.bfloat16, device=x.device)


@op("grouped_w8a8(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor ends) -> Tensor", _output)
def grouped_w8a8(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor) -> Tensor:
    """int8 or e4m3 ``x [T, K]``, float32 ``[T, 1]``; ``w [E, N, K]``, float32 ``[E, N, 1]``; int32 ``ends [E]`` -> BF16 ``[T, N]``.

    K a multiple of 16. Rows from ends[-1] on are left unwritten.
    """
    y = _output(x, x_scale, w, w_scale, ends)
    (t, k), (e, n) = x.shape, w.shape[:2]
    if k % 16:
        raise ValueError(f"grouped_w8a8 needs input features in multiples of 16, not {k}")
    if y.numel() == 0:
        return y
    x, flat = x.contiguous(), w.contiguous().view(e * n, k)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2

    def launch(config: Config) -> None:
        bm, bn, bk = config.sizes
        _kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(flat, [bn, bk]), y, x_scale, w_scale,
            ends, n, k, programs, e, triton.next_power_of_2(e), bm, bn, bk, x.dtype == torch.int8,
            num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
        )  # fmt: skip

    launch(tuned("grouped_w8a8", (x.dtype, bucket(t), e, n, k), CONFIGS, launch))
    return y
