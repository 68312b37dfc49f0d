"""The routed block on a card without a pass that only moves or widens rows; :func:`moe.reference_block` is what it computes.

T tokens, k choices each, H hidden, I intermediate, BF16. ``inverse`` int64 ``[T k]``: the sorted row of choice j of token t is
``inverse[t k + j]``. Bound by memory; bytes a sorted row, 2 H / k being a token's share:

| | torch, forward | here | torch, backward | here |
|---|---|---|---|---|
| rows of x (spread; gradient: collect) | 4 H | 2 H + 2 H / k | 6 H + 2 H / k | 2 H + 2 H / k |
| silu(gate) * up | 10 I | 6 I | 26 I | 10 I |
| sum by routing weight (collect) | 22 H + 10 H / k | 2 H + 2 H / k | 26 H + 14 H / k | 4 H + 2 H / k |

H = 2048, I = 768, k = 8: 63.5 KB forward and 90 KB backward become 13.8 KB and 21 KB; what autograd keeps of the sum is y in
BF16, not in float32. Sums run in a fixed order, without atomics: two runs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.quantize_pack import row_launch
from qarl_openrlhf.kernels.rounding import narrow, round_bf16, widen

_COLUMNS, _WARPS = 1024, 4  # 8 values, one 16-byte load, a thread
_TILE = (8, 256)  # rows and columns of silu_mul: two such loads


@triton.jit
def _spread_kernel(x, rows, inverse, stride, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """One token's row, read once and written to its K sorted places."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * stride + column, mask=column < H, other=0.0)
    for j in tl.static_range(K):
        to = tl.load(inverse + token * K + j)
        tl.store(rows + to * H + column, value, mask=column < H)


@triton.jit
def _collect_kernel(
    rows, inverse, weights, out, stride, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):
    """One token's K sorted rows, summed in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(K):
        at = tl.load(inverse + token * K + j)
        value = widen(tl.load(rows + at * stride + column, mask=column < H, other=0.0))
        if WEIGHTED:
            value = value * tl.load(weights + token * K + j)
        total += value
    tl.store(out + token * H + column, narrow(total), mask=column < H)


@triton.jit
def _combine_backward_kernel(
    dout, y, inverse, weights, dy, dweights, dout_stride, y_stride, H: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr
):
    """One token; its gradient stays in registers as a tuple of chunks."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    gradient = ()
    for start in tl.static_range(0, H, CHUNK):
        value = tl.load(dout + token * dout_stride + start + column, mask=start + column < H, other=0.0)
        gradient = gradient + (widen(value),)
    for j in tl.static_range(K):
        at = tl.load(inverse + token * K + j)
        weight = tl.load(weights + token * K + j)
        dot = tl.zeros((CHUNK,), dtype=tl.float32)
        for i in tl.static_range(len(gradient)):
            here = i * CHUNK + column
            dot += gradient[i] * widen(tl.load(y + at * y_stride + here, mask=here < H, other=0.0))
        for i in tl.static_range(len(gradient)):  # after all loads, which would have to wait for a store between them
            here = i * CHUNK + column
            tl.store(dy + at * H + here, narrow(weight * gradient[i]), mask=here < H)
        tl.store(dweights + token * K + j, tl.sum(dot, 0))


@triton.jit(do_not_specialize=["count"])
def _silu_mul_kernel(gate_up, out, count, stride, I: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < count) & (column < I)
    at = gate_up + row * stride + column
    gate, up = widen(tl.load(at, mask=inside, other=0.0)), widen(tl.load(at + I, mask=inside, other=0.0))
    silu = round_bf16(gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * I + column, narrow(silu * up), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _silu_mul_backward_kernel(
    dh, gate_up, out, count, dh_stride, stride, I: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < count) & (column < I)
    at = gate_up + row * stride + column
    gate = widen(tl.load(at, mask=inside, other=0.0))
    up = widen(tl.load(at + I, mask=inside, other=0.0))
    gradient = widen(tl.load(dh + row * dh_stride + column, mask=inside, other=0.0))
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    to = out + row * (2 * I) + column
    tl.store(to, narrow(gradient * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))), mask=inside)
    tl.store(to + I, narrow(gradient * (gate * sigmoid)), mask=inside)


def _rows(x: Tensor) -> Tensor:
    """BF16 ``[R, C]`` whose rows are contiguous."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"the fused expert kernels take bfloat16 rows, not {x.dtype}; moe.experts_mlp sends others to torch")
    return x if x.stride(-1) == 1 else x.contiguous()


def _columns(h: int) -> tuple[int, int, int]:
    """(block, warps, programs) for rows of h values."""
    block = min(max(triton.next_power_of_2(h), 256), _COLUMNS)
    return block, block * _WARPS // _COLUMNS, triton.cdiv(h, block)


def _spread_output(x: Tensor, inverse: Tensor, k: int) -> Tensor:
    return x.new_empty((inverse.shape[0], x.shape[1]))


@op("moe_spread(Tensor x, Tensor inverse, int k) -> Tensor", _spread_output)
def spread(x: Tensor, inverse: Tensor, k: int):
    """``[T, H] -> [T k, H]``: ``out[inverse[t k + j]] = x[t]``."""
    out = _spread_output(x, inverse, k)
    if out.numel():
        x = _rows(x)
        block, warps, programs = _columns(x.shape[1])
        _spread_kernel[(x.shape[0], programs)](x, out, inverse, x.stride(0), x.shape[1], k, block, num_warps=warps)
    return out


def _collect_output(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    return rows.new_empty((inverse.shape[0] // k, rows.shape[1]))


@op("moe_collect(Tensor rows, Tensor inverse, Tensor? weights, int k) -> Tensor", _collect_output)
def collect(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int):
    """``[T k, H] -> [T, H]``: the sum over j of ``weights[t, j] * rows[inverse[t k + j]]``, or of the rows themselves.

    weights: float32 ``[T, k]``. Each product and each sum is rounded to float32 in the order j = 0, 1, .., the result to BF16.
    """
    out = _collect_output(rows, inverse, weights, k)
    if out.numel():
        rows = _rows(rows)
        block, warps, programs = _columns(rows.shape[1])
        _collect_kernel[(out.shape[0], programs)](
            rows, inverse, inverse if weights is None else weights.contiguous(), out, rows.stride(0), rows.shape[1], k, block,
            weights is not None, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _combine_gradients(dout: Tensor, y: Tensor, inverse: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


@op("moe_combine_backward(Tensor dout, Tensor y, Tensor inverse, Tensor weights) -> (Tensor, Tensor)", _combine_gradients)
def combine_backward(dout: Tensor, y: Tensor, inverse: Tensor, weights: Tensor):
    """Gradients of the weighted :func:`collect` of y: (BF16 ``[T k, H]``, float32 ``[T, k]``).

    Each row's is ``weights[t, j] * dout[t]``, rounded once; each weight's the float32 product of dout[t] with that row of y.
    """
    dy, dweights = _combine_gradients(dout, y, inverse, weights)
    if dy.numel():
        dout, y = _rows(dout), _rows(y)
        (tokens, h), k = dout.shape, weights.shape[1]
        chunk, warps = row_launch(h)
        _combine_backward_kernel[(tokens,)](
            dout, y, inverse, weights.contiguous(), dy, dweights, dout.stride(0), y.stride(0), h, k, chunk, num_warps=warps
        )
    return dy, dweights


def _silu_mul_output(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@op("silu_mul(Tensor gate_up) -> Tensor", _silu_mul_output)
def silu_mul(gate_up: Tensor):
    """``[R, 2 I] -> [R, I]``: silu of the first half, in float32 and rounded, times the second, rounded."""
    out = _silu_mul_output(gate_up)
    if out.numel():
        gate_up = _rows(gate_up)
        (r, i), (tile, block) = out.shape, _TILE
        grid = (triton.cdiv(r, tile), triton.cdiv(i, block))
        _silu_mul_kernel[grid](gate_up, out, r, gate_up.stride(0), i, tile, block, num_warps=_WARPS)
    return out


def _silu_mul_backward_output(dh: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


@op("silu_mul_backward(Tensor dh, Tensor gate_up) -> Tensor", _silu_mul_backward_output)
def silu_mul_backward(dh: Tensor, gate_up: Tensor):
    """Gradient ``[R, 2 I]`` of :func:`silu_mul` from dh ``[R, I]``; float32 inside, rounded once."""
    out = _silu_mul_backward_output(dh, gate_up)
    if out.numel():
        dh, gate_up = _rows(dh), _rows(gate_up)
        (r, i), (tile, block) = dh.shape, _TILE
        grid = (triton.cdiv(r, tile), triton.cdiv(i, block))
        _silu_mul_backward_kernel[grid](
            dh, gate_up, out, r, dh.stride(0), gate_up.stride(0), i, tile, block, num_warps=_WARPS
        )
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return spread(x, inverse, k)

    @staticmethod
    def backward(ctx, drows):
        (inverse,) = ctx.saved_tensors
        return collect(drows, inverse, None, ctx.k), None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return silu_mul(gate_up)

    @staticmethod
    def backward(ctx, dh):
        (gate_up,) = ctx.saved_tensors
        return silu_mul_backward(dh, gate_up)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, inverse, weights):
        ctx.save_for_backward(y, inverse, weights)
        return collect(y, inverse, weights, weights.shape[1])

    @staticmethod
    def backward(ctx, dout):
        dy, dweights = combine_backward(dout, *ctx.saved_tensors)
        return dy, None, dweights


def block(x: Tensor, inverse: Tensor, ends: Tensor, weights: Tensor, gate_up, down) -> Tensor:
    """:func:`moe.reference_block` with these kernels; differentiable in x, weights, and what the two products are."""
    rows = _Spread.apply(x, inverse, weights.shape[1])
    h = _SiluMul.apply(gate_up(rows, ends))
    return _Combine.apply(down(h, ends), inverse, weights.float())
