"""Quantize BF16 weights, pack them, and write the dequantized copy, in one read of the weight.

Byte-equal with :mod:`qarl_openrlhf.kernels.reference`. Bound by memory: with G = 128 a weight costs 2 bytes read and
0.52 written (int4), 1 written (int8, fp8), and 2 more for the copy.

Groups are contiguous in a contiguous weight, so the int4 kernel sees [groups, G] and no rows. Per-channel formats and
W4A8 (whose group scales depend on the row's largest) hold whole rows in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels import MAX_ROW
from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.rounding import (
    MAGIC,
    absmax,
    divide_bf16,
    larger,
    narrow,
    quotient,
    round_bf16,
    round_e4m3,
    to_e4m3,
    weight_scale,
    widen,
)

SHIFT = tl.constexpr(MAGIC.value + 8.0)
SMALLEST = tl.constexpr(0.001953125)  # of e4m3's positive numbers: a stored group scale is never zero
SHIFT_WORD = tl.constexpr(sum(0x4B400000 << 4 * j for j in range(8)) % 2**32)


@triton.jit
def shifted_int4(q):
    """Quotients to codes: the low 4 bits of the float32 result hold code + 8, and subtracting SHIFT gives the code."""
    return tl.minimum(tl.maximum(q, -8.0), 7.0) + SHIFT


@triton.jit
def store_int4(shifted, at, mask, A: tl.constexpr, B: tl.constexpr):
    """Pack [A, B] codes 8 to an int32, lowest nibble = lowest column, and store [A, B/8]."""
    bits = tl.reshape(shifted.to(tl.uint32, bitcast=True), A, B // 8, 8)
    # The sum also adds the bits of SHIFT at each of the 8 places, a constant: cheaper to take off once than to mask.
    words = tl.sum(bits << (4 * tl.arange(0, 8))[None, None, :].to(tl.uint32), 2) - SHIFT_WORD
    tl.store(at, words.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _int4_kernel(w, packed, scales, copy, groups, G: tl.constexpr, TILE: tl.constexpr, COPY: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = group < groups
    at = group[:, None] * G + tl.arange(0, G)[None, :]
    x = widen(tl.load(w + at, mask=inside[:, None], other=0.0))
    scale = weight_scale(absmax(x, 1), 1.0 / 7.5)
    tl.store(scales + group, narrow(scale), mask=inside)
    scale = scale[:, None]
    packed_at = packed + group[:, None] * (G // 8) + tl.arange(0, G // 8)[None, :]
    shifted = shifted_int4(quotient(x, scale))
    store_int4(shifted, packed_at, inside[:, None], TILE, G)
    if COPY:
        tl.store(copy + at, narrow((shifted - SHIFT) * scale), mask=inside[:, None])


@triton.jit
def _row8(q, scale, FP8: tl.constexpr):
    """Codes of quotients q, and the BF16 copy."""
    if FP8:
        code, value = to_e4m3(q + 0.0)  # the reference adds a zero point: -0.0 becomes +0.0
    else:
        shifted = tl.minimum(tl.maximum(q, -128.0), 127.0) + MAGIC
        code, value = shifted.to(tl.int32, bitcast=True).to(tl.int8), shifted - MAGIC
    return code, narrow(value * scale)


@triton.jit
def _row8_kernel(w, codes, scales, copy, K: tl.constexpr, CHUNK: tl.constexpr, FP8: tl.constexpr, COPY: tl.constexpr):
    """One row, held in registers as a tuple of chunks."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    chunks = ()
    largest = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in tl.static_range(0, K, CHUNK):
        x = tl.load(w + row * K + start + column, mask=start + column < K, other=0.0)
        largest = larger(largest, tl.abs(widen(x)))
        chunks = chunks + (x,)
    scale = weight_scale(absmax(largest, 0), 1.0 / (448.0 if FP8 else 127.5))
    tl.store(scales + row, narrow(scale))
    for i in tl.static_range(len(chunks)):
        code, value = _row8(quotient(widen(chunks[i]), scale), scale, FP8)
        at = row * K + i * CHUNK + column
        tl.store(codes + at, code, mask=i * CHUNK + column < K)
        if COPY:
            tl.store(copy + at, value, mask=i * CHUNK + column < K)


@triton.jit
def engine_channel(largest):
    """The channel scale (before its factor 8) that vLLM's W4A8 kernel gives a row whose largest group scale this is."""
    return larger(tl.div_rn(largest, 448.0), 1.0 / (448.0 * 512.0))


@triton.jit
def engine_group(scale, channel):
    """Its e4m3 group scales, as float32: e4m3(e4m3(scale / channel) / 8), of BF16 scales [GROUPS] of one row."""
    group = round_e4m3(divide_bf16(scale, channel))
    return (group * 0.125 + 24576.0) - 24576.0  # an eighth of an e4m3 number is one, but for the denormals


@triton.jit
def _w4a8_kernel(w, packed, scales, copy, GROUPS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, COPY: tl.constexpr):
    """One row of groups of 128, in chunks of CHUNK groups: its scales move onto the engine's grid before the codes.

    A group comes in pieces of PIECE weights. The fewer, the more threads share it, each of which repeats the arithmetic of the
    scale; the more, the more weights a thread holds.
    """
    PIECES: tl.constexpr = 128 // PIECE
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group, column = tl.arange(0, CHUNK), tl.arange(0, PIECE)[None, :]
    word = tl.arange(0, PIECE // 8)[None, :]
    pieces, chunk_scales = (), ()
    largest = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in tl.static_range(0, GROUPS, CHUNK):
        inside = start + group < GROUPS
        at = (first + start + group)[:, None] * 128 + column
        top = tl.zeros((CHUNK, PIECE), dtype=tl.float32)
        for piece in tl.static_range(PIECES):
            x = tl.load(w + at + piece * PIECE, mask=inside[:, None], other=0.0)
            top = larger(top, tl.abs(widen(x)))
            pieces = pieces + (x,)
        scale = tl.where(inside, weight_scale(absmax(top, 1), 1.0 / 7.5), 0.0)
        largest = larger(largest, scale)
        chunk_scales = chunk_scales + (scale,)
    largest = absmax(largest, 0)
    channel = engine_channel(largest)
    # The channel scale that the engine will compute from the stored scales. Its group scales will be the ones below: the
    # stored scale is within 2^-8 of their product with the channel scale, and e4m3 numbers are further apart.
    engines = engine_channel(widen(narrow(larger(engine_group(largest, channel), SMALLEST) * (channel * 8.0))))
    for i in tl.static_range(len(chunk_scales)):
        inside = i * CHUNK + group < GROUPS
        at = first + i * CHUNK + group
        fine = larger(engine_group(chunk_scales[i], channel), SMALLEST)
        stored = narrow(fine * (channel * 8.0))
        tl.store(scales + at, stored, mask=inside)
        inverse = (1.0 / widen(stored))[:, None]  # a stored scale is at least 2^-24: nothing overflows, as quotient() fears
        for piece in tl.static_range(PIECES):
            elements = at[:, None] * 128 + piece * PIECE + column
            shifted = shifted_int4(round_bf16(widen(pieces[PIECES * i + piece]) * inverse))
            store_int4(shifted, packed + at[:, None] * 16 + piece * (PIECE // 8) + word, inside[:, None], CHUNK, PIECE)
            if COPY:
                operand = round_e4m3((shifted - SHIFT) * fine[:, None])
                tl.store(copy + elements, narrow(operand * (engines * 8.0)), mask=inside[:, None])


def w4a8_launch(groups: int) -> tuple[int, int, int]:
    """(groups a chunk, weights a piece, warps) for rows of so many groups, 8 weights a thread and piece.

    A thread holds at most 48 weights: with 96 (rows of 12,288 in 4 warps) it takes 189 registers, and 8 warps are all that an SM
    has room for. Then least padding, then least repeated arithmetic, then least warps.
    """
    choices = []
    for warps in (1, 2, 4, 8, 16, 32):
        for piece in (32, 64, 128):
            chunk = 256 * warps // piece
            padded = triton.cdiv(groups, chunk) * chunk
            if 4 * padded <= 48 * warps:
                choices.append((padded, piece, warps, chunk))
    _, piece, warps, chunk = min(choices)
    return chunk, piece, warps


def row_launch(k: int) -> tuple[int, int]:
    """(chunk, warps) with which one program holds a row of k values in registers."""
    if k > MAX_ROW:
        raise ValueError(f"rows of {k} values do not fit in registers: at most {MAX_ROW} input features")
    warps = next(w for w, most in ((1, 1024), (2, 2048), (4, 10240), (8, 16384), (16, MAX_ROW)) if k <= most)
    return 256 * warps, warps  # 8 values, one 16-byte load, a thread and chunk


def _contiguous(w: Tensor) -> Tensor:
    if w.dtype != torch.bfloat16:
        raise TypeError(f"the Triton quantizers take bfloat16 weights, not {w.dtype}; dispatch sends others to torch")
    return w.contiguous()


def _empty_copy(w: Tensor, wanted: bool) -> Tensor:
    return torch.empty(w.shape if wanted else 0, dtype=torch.bfloat16, device=w.device)


def _int4_outputs(w: Tensor, group_size: int, copy: bool) -> tuple[Tensor, Tensor, Tensor]:
    packed = torch.empty((*w.shape[:-1], w.shape[-1] // 8), dtype=torch.int32, device=w.device)
    scales = torch.empty((*w.shape[:-1], w.shape[-1] // group_size), dtype=torch.bfloat16, device=w.device)
    return packed, scales, _empty_copy(w, copy)


@op("quantize_int4(Tensor w, int group_size, bool copy) -> (Tensor, Tensor, Tensor)", _int4_outputs)
def quantize_int4(w: Tensor, group_size: int, copy: bool):
    """``[..., N, K]`` BF16 -> (packed int32 ``[..., N, K/8]``, BF16 scale ``[..., N, K/G]``, W_dq or an empty tensor)."""
    w = _contiguous(w)
    outputs = _int4_outputs(w, group_size, copy)
    groups = w.numel() // group_size
    tile = 4096 // group_size
    if groups:
        grid = (triton.cdiv(groups, tile),)
        _int4_kernel[grid](w, *outputs, groups, group_size, tile, copy, num_warps=4)
    return outputs


def _w4a8_outputs(w: Tensor, copy: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _int4_outputs(w, 128, copy)


@op("quantize_w4a8(Tensor w, bool copy) -> (Tensor, Tensor, Tensor)", _w4a8_outputs)
def quantize_w4a8(w: Tensor, copy: bool):
    """As :func:`quantize_int4` at group 128, with scales on the grid of vLLM's W4A8 kernel."""
    w = _contiguous(w)
    outputs = _w4a8_outputs(w, copy)
    groups = w.shape[-1] // 128
    if w.numel():
        row_launch(w.shape[-1])  # refuses rows that are too long
        chunk, piece, warps = w4a8_launch(groups)
        _w4a8_kernel[(w.numel() // w.shape[-1],)](w, *outputs, groups, chunk, piece, copy, num_warps=warps)
    return outputs


def _row8_outputs(w: Tensor, fp8: bool, copy: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn if fp8 else torch.int8, device=w.device)
    scales = torch.empty((*w.shape[:-1], 1), dtype=torch.bfloat16, device=w.device)
    return codes, scales, _empty_copy(w, copy)


@op("quantize_row8(Tensor w, bool fp8, bool copy) -> (Tensor, Tensor, Tensor)", _row8_outputs)
def quantize_row8(w: Tensor, fp8: bool, copy: bool):
    """``[..., N, K]`` BF16 -> (int8 or e4m3 codes, BF16 scale ``[..., N, 1]``, W_dq or an empty tensor)."""
    w = _contiguous(w)
    codes, scales, dequantized = _row8_outputs(w, fp8, copy)
    k = w.shape[-1]
    if w.numel():
        chunk, warps = row_launch(k)
        stored = codes.view(torch.uint8) if fp8 else codes
        _row8_kernel[(w.numel() // k,)](w, stored, scales, dequantized, k, chunk, fp8, copy, num_warps=warps)
    return codes, scales, dequantized
