"""BF16 activations times packed int4 weights, for few rows: y = x @ bf16(code * scale)^T + bias, float32 accumulation.

Bound by memory (0.52 byte a weight against BF16's 2) up to about 64 rows. Above that, dequantizing once and the library's
product are faster, and dispatch does that. Shapes that :mod:`qarl_openrlhf.kernels.w4a16_mma` takes go there; the kernel
below is for the others and for the interpreter.

An int32 word becomes eight BF16 weights in registers, two at a time: mask a nibble in each half of the word, set the
exponent so that it reads 128 + nibble, subtract 136, multiply by the scale (one rounding, as in the reference). The tensor
cores take W as their left operand, from shared memory, and x^T as the right one, so that 16 rows of x are enough to fill an
instruction. While they work on one step, the next is loaded; the one after that is fetched into L2.

K is split over several programs if N alone cannot fill the card. The last program of a tile to finish adds the partial sums
in a fixed order, so results do not depend on timing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels import w4a16_mma
from qarl_openrlhf.kernels.library import INTERPRETED, op
from qarl_openrlhf.kernels.rounding import NATIVE, narrow, widen
from qarl_openrlhf.kernels.tune import Config, tuned
from qarl_openrlhf.kernels.unpack_asm import unpack_asm

MAX_ROWS = 64
FAR = tl.constexpr(4)  # steps that the fetch into L2 is ahead


# $9 is the BF16 scale; 0x4308 is 136.
UNPACK = tl.constexpr(
    unpack_asm(
        ["{.reg .b32 t, s, offset;", "mov.b32 s, {$9, $9};", "mov.b32 offset, 0x43084308;"],
        ["sub.rn.bf16x2 t, t, offset;", "mul.rn.bf16x2 t, t, s;"],
    )
)


@triton.jit
def _nibble(words, scale, SHIFT: tl.constexpr):
    return narrow((((words >> SHIFT) & 15) - 8).to(tl.float32) * widen(scale))


@triton.jit
def _weights(words, scale, A: tl.constexpr, B: tl.constexpr):
    """int32 words [A, B], BF16 scales [A, B] or [A, 1] -> BF16 weights [A, 8 B]."""
    scale = tl.broadcast_to(scale, A, B)
    if NATIVE:
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [words, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        w0, w1, w2, w3 = _nibble(words, scale, 0), _nibble(words, scale, 4), _nibble(words, scale, 8), _nibble(words, scale, 12)
        w4, w5, w6, w7 = _nibble(words, scale, 16), _nibble(words, scale, 20), _nibble(words, scale, 24), _nibble(words, scale, 28)
    # tl.join adds a last axis of 2, so the outermost join is bit 0 of the nibble's number.
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), A, 8 * B)


@triton.jit
def _dot(w, x, total):
    if NATIVE:
        return tl.dot(w, x, total)
    return tl.dot(widen(w), widen(x), total)  # the interpreter's BF16 dot is wrong


@triton.jit
def _kernel(
    x, packed, scales, y, bias, partial, done, M, N, row_words, SPLIT, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WORDS: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    column = tile * BN + tl.arange(0, BN)
    row = tl.arange(0, BM)
    word = tl.arange(0, WORDS)
    K = 8 * row_words  # passed in words, so that Triton sees that rows of words are 16-byte aligned
    steps = row_words // WORDS
    first, last = part * steps // SPLIT, (part + 1) * steps // SPLIT
    here, there = (column < N)[:, None], (row < M)[:, None]
    packed_rows = packed + tl.minimum(column, N - 1).to(tl.int64) * row_words
    packed += column[:, None].to(tl.int64) * row_words + word[None, :]
    # Scales of one step: [BN, 1] if a group covers it, else [BN, WORDS] with repeats.
    scales += column[:, None].to(tl.int64) * (K // G)
    if 8 * WORDS > G:
        scales += word[None, :] // (G // 8)
    x += row[:, None] * K + tl.arange(0, 8 * WORDS)[None, :]
    total = tl.zeros((BN, BM), dtype=tl.float32)
    # A pipeline by hand: multiply one step, unpack the next, load the one after.
    second = tl.minimum(first + 1, last - 1)
    words = tl.load(packed + first * WORDS, mask=here, other=0)
    scale = tl.load(scales + first * (8 * WORDS) // G, mask=here, other=0.0)
    w = _weights(words, scale, BN, WORDS)
    words = tl.load(packed + second * WORDS, mask=here, other=0)
    scale = tl.load(scales + second * (8 * WORDS) // G, mask=here, other=0.0)
    for step in range(first, last):
        rows = tl.load(x + step * (8 * WORDS), mask=there, other=0.0)
        total = _dot(w, rows.T, total)
        # After the product: the memory fence before it would wait for these loads.
        ahead = tl.minimum(step + 2, last - 1)
        words_ahead = tl.load(packed + ahead * WORDS, mask=here, other=0)
        scale_ahead = tl.load(scales + ahead * (8 * WORDS) // G, mask=here, other=0.0)
        if NATIVE:
            far = packed_rows + tl.minimum(step + FAR, last - 1) * WORDS
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [far.to(tl.int64)], dtype=tl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip
        w = _weights(words, scale, BN, WORDS)
        words, scale = words_ahead, scale_ahead
    inside = here & (row < M)[None, :]
    at = row[None, :] * N + column[:, None]
    if IS_SPLIT:
        tl.store(partial + part * M * N + at, total, mask=inside)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        arrived = tl.atomic_add(done + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = tl.zeros((BN, BM), dtype=tl.float32)
            for other in range(SPLIT):
                total += tl.load(partial + other * M * N + at, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(total, y + at, inside, bias, column, N, HAS_BIAS)
            tl.store(done + tile, 0)
    else:
        _finish(total, y + at, inside, bias, column, N, HAS_BIAS)


@triton.jit
def _finish(total, at, inside, bias, column, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += widen(tl.load(bias + column, mask=column < N, other=0.0))[:, None]
    tl.store(at, narrow(total), mask=inside)


# (BN, WORDS, SPLIT), warps, stages
CONFIGS = [
    Config((bn, words, split), warps, 3)
    for bn, words, warps in ((64, 16, 4), (128, 16, 8), (64, 8, 4), (64, 4, 4))
    for split in (1, 2, 3, 4, 6, 8)
]
_arrivals: dict[tuple, Tensor] = {}


def _arrival_counters(x: Tensor, tiles: int) -> Tensor:
    """Zeros, one a tile; every call leaves them zero. One set a stream, as calls on two streams can overlap."""
    key = (x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)
    if key not in _arrivals or _arrivals[key].numel() < tiles:
        _arrivals[key] = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=x.device)
    return _arrivals[key]


def _fitting(n: int, k: int) -> list[Config]:
    """Configurations whose step divides K, with the widest such step, and enough programs for a card but not too many."""
    words = max(c.sizes[1] for c in CONFIGS if k % (8 * c.sizes[1]) == 0)
    steps = k // (8 * words)
    fitting = [c for c in CONFIGS if c.sizes[1] == words and c.sizes[2] <= steps]
    programs = {c: triton.cdiv(n, c.sizes[0]) * c.sizes[2] for c in fitting}
    return [c for c in fitting if 256 <= programs[c] <= 1200] or [max(fitting, key=programs.get)]


def _output(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty((x.shape[0], packed.shape[0]), dtype=torch.bfloat16, device=x.device)


@op("w4a16_gemm(Tensor x, Tensor packed, Tensor scales, Tensor? bias) -> Tensor", _output)
def w4a16_gemm(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """BF16 ``x [M, K]`` (M at most 64), int32 ``[N, K/8]``, BF16 ``[N, K/G]``, BF16 bias ``[N]`` -> BF16 ``[M, N]``."""
    y = _output(x, packed, scales, bias)
    (m, k), n = x.shape, packed.shape[0]
    if m > MAX_ROWS:
        raise ValueError(f"w4a16_gemm is for at most {MAX_ROWS} rows, not {m}: dequantize and multiply")
    if y.numel() == 0:
        return y
    x, packed, scales = x.contiguous(), packed.contiguous(), scales.contiguous()
    group_size, bm = k // scales.shape[1], max(16, triton.next_power_of_2(m))
    if m <= w4a16_mma.MOST_ROWS and w4a16_mma.suits(k, group_size) and not INTERPRETED:
        arrivals = _arrival_counters(x, triton.cdiv(n, 64))
        by_hand = lambda config: w4a16_mma.launch(config, x, packed, scales, bias, y, arrivals)  # noqa: E731
        family = (w4a16_mma.rows_held(m), n, k, group_size)
        by_hand(tuned("w4a16_mma", family, w4a16_mma.fitting(n, k), by_hand))
        return y
    fitting = _fitting(n, k)

    def launch(config: Config) -> None:
        bn, words, split = config.sizes
        tiles = triton.cdiv(n, bn)
        partial = torch.empty(split * m * n if split > 1 else 0, dtype=torch.float32, device=x.device)
        _kernel[(tiles, split)](
            x, packed, scales, y, bias, partial, _arrival_counters(x, tiles), m, n, k // 8, split, group_size, bm, bn, words,
            split > 1, bias is not None, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip

    launch(tuned("w4a16_gemm", (bm, n, k, group_size), fitting, launch))
    return y
