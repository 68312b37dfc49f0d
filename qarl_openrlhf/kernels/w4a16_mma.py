"""w4a16_gemm where the layout of registers is chosen by hand (Gluon): K a multiple of 256, groups of 32, 64 or 128.

An int32 word holds 8 neighbouring k. The tensor cores' left operand (k_width 8) gives a thread 8 places of k in each 32, so a
thread that loads 4 neighbouring words of a row, 16 bytes, can call them its places of four such 32s: the order of k inside
a product is free as long as x follows it. x, which is small, is put in that order on its way through shared memory; an
unpacked weight never leaves the registers of the thread that unpacked it.

Packed words are loaded a step of 128 SUB values of k ahead. K is split over programs as in
:mod:`qarl_openrlhf.kernels.w4a16_gemm`. Timed and slower: two steps ahead, a fetch into L2 further ahead, x loaded by each thread for
itself, steps of 128.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from qarl_openrlhf.kernels.tune import Config
from qarl_openrlhf.kernels.unpack_asm import unpack_asm


_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed after Triton 3.6
# $9 is twice the BF16 scale. Products and sums as fma: before Hopper there is no other BF16 arithmetic. 1, -136 and -0, each twice.
UNPACK = gl.constexpr(
    unpack_asm(
        ["{.reg .b32 t, one, offset, zero;", "mov.b32 one, 0x3F803F80;", "mov.b32 offset, 0xC308C308;", "mov.b32 zero, 0x80008000;"],
        ["fma.rn.bf16x2 t, t, one, offset;", "fma.rn.bf16x2 t, t, $9, zero;"],
    )
)


@gluon.constexpr_function
def words_layout(warps, bn, sub):
    """[BN, SUB, 4 threads of a quad, 4 words of a thread], rows as the A fragment has them."""
    reg, warp, at = [[0, 0, 0, 1], [0, 0, 0, 2], [8, 0, 0, 0]], [], 16
    while at < bn:
        (warp if at < 16 * warps else reg).append([at, 0, 0, 0])
        at *= 2
    if sub == 2:
        reg.append([0, 1, 0, 0])
    lane = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [bn, sub, 4, 4])


@gluon.constexpr_function
def rows_layout(warps, bm, sub, ordered):
    """[BM, SUB, 4 threads, 4 words, 8 nibbles] of x as the B fragment has them, alike in every warp; ordered: words first."""
    thread, word = (3, 2) if ordered else (2, 3)

    def basis(axis, value):
        return [value if i == axis else 0 for i in range(5)]

    reg, at = [basis(4, 1), basis(4, 2), basis(4, 4), basis(word, 1), basis(word, 2)], 8
    if sub == 2:
        reg.append(basis(1, 1))
    while at < bm:
        reg.append(basis(0, at))
        at *= 2
    lane = [basis(thread, 1), basis(thread, 2), basis(0, 1), basis(0, 2), basis(0, 4)]
    warp, at = [], 1
    while at < warps:
        warp.append(basis(0, 0))
        at *= 2
    return gl.DistributedLinearLayout(reg, lane, warp, [], [bm, sub, 4, 4, 8])


@gluon.constexpr_function
def shared_rows(bm, sub):
    """[BM, SUB, 4 words, 4 threads, 8 slots] in shared memory: neither its stores nor its loads meet in a bank."""
    offset = [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 2]]  # an instruction takes the same two slots of two words
    offset += [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    offset += [[0, 0, 0, 0, 4], [1, 0, 2, 0, 0]]
    if sub == 2:
        offset.append([0, 1, 0, 0, 0])
    at = 8
    while at < bm:
        offset.append([at, 0, 0, 0, 0])
        at *= 2
    return gl.SharedLinearLayout(offset)


@gluon.constexpr_function
def axis_layout(layout, axis, rank):
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _axis(SIZE: gl.constexpr, AXIS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. SIZE - 1 along an axis, 1 long along the others."""
    index = gl.arange(0, SIZE, layout=axis_layout(LAYOUT, AXIS, RANK))
    for other in gl.static_range(RANK):
        if other != AXIS:
            index = gl.expand_dims(index, other)
    return index


@gluon.jit
def _weights(words, scale2, BN: gl.constexpr, SUB: gl.constexpr, MMA: gl.constexpr):
    """int32 words [BN, SUB, 4, 4], scale bits twice [BN, SUB, 4, 1] -> BF16 A operand [BN, 128 SUB]."""
    w0, w1, w2, w3, w4, w5, w6, w7 = gl.inline_asm_elementwise(
        UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale2],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip
    low = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    high = gl.join(gl.join(w4, w6), gl.join(w5, w7))
    w = gl.join(low, high)  # slot 2 p + h of a word is nibble p + 4 h: the two of a register stay together
    w = gl.reshape(w, [BN, SUB, 4, 4, 8])
    w = gl.reshape(gl.permute(w, [0, 1, 3, 2, 4]), [BN, 128 * SUB])
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 8), assert_trivial=True)


@gluon.jit
def _scales(at):
    bits = gl.load(at).to(gl.uint16, bitcast=True).to(gl.uint32)
    return bits | (bits << 16)


@gluon.jit
def _ordered(rows, BM: gl.constexpr, SUB: gl.constexpr):
    """x [BM, SUB, threads, words, nibbles] as in memory -> [BM, SUB, words, threads, slots], the weights' order of k."""
    rows = gl.reshape(rows, [BM, SUB, 4, 4, 2, 4])
    return gl.reshape(gl.permute(rows, [0, 1, 3, 2, 5, 4]), [BM, SUB, 4, 4, 8])


@gluon.jit
def _x_operand(rows, BM: gl.constexpr, SUB: gl.constexpr, MMA: gl.constexpr):
    """Ordered x, held as the B fragment -> B operand [128 SUB, BM]."""
    rows = gl.permute(gl.reshape(rows, [BM, 128 * SUB]), [1, 0])
    return gl.convert_layout(rows, gl.DotOperandLayout(1, MMA, 8), assert_trivial=True)


@gluon.jit(do_not_specialize=["M", "SPLIT"])
def _kernel(
    x, packed, scales, y, bias, partial, done, M, N, row_words, SPLIT, G: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    SUB: gl.constexpr, IS_SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    L: gl.constexpr = words_layout(WARPS, BN, SUB)
    STEP: gl.constexpr = 16 * SUB  # words
    tile, part = gl.program_id(0), gl.program_id(1)
    K = 8 * row_words
    steps = row_words // STEP
    first, last = part * steps // SPLIT, (part + 1) * steps // SPLIT

    # Rows past the end read the last one again: their results are not stored.
    row = gl.minimum(tile * BN + _axis(BN, 0, 4, L), N - 1) - tile * BN
    packed += tile.to(gl.int64) * BN * row_words
    at = row * row_words + _axis(SUB, 1, 4, L) * 16 + _axis(4, 2, 4, L) * 4 + _axis(4, 3, 4, L)
    scales += tile.to(gl.int64) * BN * (K // G)
    scale_at = row * (K // G)
    scale_k = _axis(SUB, 1, 4, L) * 128 + _axis(4, 2, 4, L) * 32

    X: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 8], [4, 1, 4, 2, 1], [WARPS // SUB, SUB, 1, 1, 1], [4, 3, 2, 1, 0])
    x_at = gl.minimum(_axis(BM, 0, 5, X), M - 1) * K + _axis(SUB, 1, 5, X) * 128 + _axis(4, 2, 5, X) * 32
    x_at = x_at + _axis(4, 3, 5, X) * 8 + _axis(8, 4, 5, X)
    stage = gl.allocate_shared_memory(gl.bfloat16, [BM, SUB, 4, 4, 8], shared_rows(BM, SUB))

    total = gl.full([BN, BM], 0.0, gl.float32, layout=MMA)
    words = gl.load(packed + at + first * STEP, eviction_policy="evict_first")
    scale = _scales(scales + scale_at + (first * (8 * STEP) + scale_k) // G)
    rows = gl.load(x + x_at + first * (8 * STEP))
    for step in range(first, last):
        # What the next step needs is asked for before this one is worked on.
        near = gl.minimum(step + 1, last - 1)
        words_ahead = gl.load(packed + at + near * STEP, eviction_policy="evict_first")
        scale_ahead = _scales(scales + scale_at + (near * (8 * STEP) + scale_k) // G)
        ordered = _ordered(rows, BM, SUB)
        rows = gl.load(x + x_at + near * (8 * STEP))
        stage.store(ordered)
        operand = _x_operand(stage.load(rows_layout(WARPS, BM, SUB, True)), BM, SUB, MMA)
        total = mma_v2(_weights(words, scale, BN, SUB, MMA), operand, total)
        words, scale = words_ahead, scale_ahead

    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32] if BN >= 128 else [2, 16], [WARPS, 1], [1, 0])
    result = gl.convert_layout(gl.permute(total, [1, 0]), OUT)
    m = _axis(BM, 0, 2, OUT)
    column = tile * BN + _axis(BN, 1, 2, OUT)
    inside = (m < M) & (column < N)
    out = m * N + column
    if IS_SPLIT:
        gl.store(partial + part * M * N + out, result, mask=inside)
        _barrier()  # all of the program's stores come before its arrival
        arrived = gl.atomic_add(done + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            result = gl.full([BM, BN], 0.0, gl.float32, layout=OUT)
            for other in range(0, SPLIT, 4):  # four at a time in flight, added in order
                p0 = _partial(partial + out, other, M * N, inside, SPLIT)
                p1 = _partial(partial + out, other + 1, M * N, inside, SPLIT)
                p2 = _partial(partial + out, other + 2, M * N, inside, SPLIT)
                p3 = _partial(partial + out, other + 3, M * N, inside, SPLIT)
                result = (((result + p0) + p1) + p2) + p3
            _finish(result, y + out, inside, bias, column, N, HAS_BIAS)
            gl.store(done + tile, 0)
    else:
        _finish(result, y + out, inside, bias, column, N, HAS_BIAS)


@gluon.jit
def _partial(at, part, SIZE, inside, SPLIT):
    return gl.load(at + part * SIZE, mask=inside & (part < SPLIT), other=0.0, cache_modifier=".cg")


@gluon.jit
def _finish(total, at, inside, bias, column, N, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        total += gl.load(bias + column, mask=column < N, other=0.0).to(gl.float32)
    gl.store(at, total.to(gl.bfloat16), mask=inside)


SUB = 2
MOST_ROWS = 16  # above, w4a16_gemm's own kernel is faster
TILES = [(64, 4), (128, 8)]  # BN, warps; splits are tried with each
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
SCHEDULERS = 528  # of an H100 or H200


def suits(k: int, group_size: int) -> bool:
    """Whether this kernel can multiply rows of k values with scales for each ``group_size`` of them."""
    return k % (128 * SUB) == 0 and group_size in (32, 64, 128)


def rows_held(m: int) -> int:
    """Rows of x that a program works on: the right operand's width, 8 at least."""
    return max(8, triton.next_power_of_2(m))


def fitting(n: int, k: int) -> list[Config]:
    """Configurations worth timing: K divides into their steps, and their warps fill a card once or a few times."""
    found, most = [], None
    splits = [s for s in SPLITS if s <= max(k // (256 * SUB), 1)]
    for bn, warps in TILES:
        filled = {s: triton.cdiv(n, bn) * s * warps / SCHEDULERS for s in splits}
        found += [Config((bn, s), warps, 1) for s in splits if 1.4 <= filled[s] <= 6]
        most = most or Config((bn, splits[-1]), warps, 1)
    return found or [most]


def launch(
    config: Config, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor, arrivals: Tensor
) -> None:
    """Run one configuration; shapes as :func:`qarl_openrlhf.kernels.w4a16_gemm.w4a16_gemm`, all contiguous.

    arrivals: int32 zeros, at least one for each 64 output features; left zero.
    """
    bn, split = config.sizes
    (m, k), n = x.shape, packed.shape[0]
    partial = torch.empty(split * m * n if split > 1 else 0, dtype=torch.float32, device=x.device)
    _kernel[(triton.cdiv(n, bn), split)](
        x, packed, scales, y, bias, partial, arrivals, m, n, k // 8, split, k // scales.shape[1], rows_held(m), bn, SUB,
        split > 1, bias is not None, config.warps, num_warps=config.warps,
    )  # fmt: skip
