"""Packed weights back to BF16, and W4A8's e4m3 operand. Bound by memory: 0.52 or 1 byte read a weight, 2 (or 1) written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_openrlhf.kernels.library import op
from qarl_openrlhf.kernels.quantize_pack import engine_channel, engine_group
from qarl_openrlhf.kernels.rounding import absmax, narrow, round_e4m3, to_e4m3, widen

_WORDS = 1024  # int32 words (8 weights each) to a program


@triton.jit
def unpack_int4(words):
    """int32 [A, B] -> codes as float32 [A, B, 8]."""
    nibbles = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    # 2^23 + nibble has the bits 0x4B000000 | nibble: cheaper than an integer conversion.
    return (nibbles | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _int4_kernel(packed, scales, out, groups, G: tl.constexpr, TILE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = group < groups
    at = group[:, None] * (G // 8) + tl.arange(0, G // 8)[None, :]
    words = tl.load(packed + at, mask=inside[:, None], other=0)
    scale = widen(tl.load(scales + group, mask=inside, other=0.0))
    w = unpack_int4(words) * scale[:, None, None]
    w = tl.reshape(w, TILE, G)
    at = group[:, None] * G + tl.arange(0, G)[None, :]
    tl.store(out + at, narrow(w), mask=inside[:, None])


@triton.jit
def _row8_kernel(codes, scales, out, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < K
    scale = widen(tl.load(scales + row))
    code = tl.load(codes + row * K + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + column, narrow(code * scale), mask=inside)


@triton.jit
def _channel(scales, first, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """engine_channel of the row whose group scales start at ``first``."""
    index = tl.arange(0, BLOCK)
    return engine_channel(absmax(widen(tl.load(scales + first + index, mask=index < GROUPS, other=0.0)), 0))


@triton.jit
def _w4a8_kernel(
    packed, scales, out, channels, GROUPS: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr
):
    """TILE groups of one row: the e4m3 operand (and the channel scale), or their BF16 product."""
    row = tl.program_id(0).to(tl.int64)
    channel = _channel(scales, row * GROUPS, GROUPS, ALL)
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = index < GROUPS
    group = row * GROUPS + index
    fine = engine_group(widen(tl.load(scales + group, mask=inside, other=0.0)), channel)
    words = tl.load(packed + group[:, None] * 16 + tl.arange(0, 16)[None, :], mask=inside[:, None], other=0)
    product = unpack_int4(words) * fine[:, None, None]
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if OPERAND:
        code, _ = to_e4m3(product)
        tl.store(out + at, tl.reshape(code, TILE, 128), mask=inside[:, None])
        tl.store(channels + row, channel * 8.0)
    else:
        value = round_e4m3(product) * (channel * 8.0)
        tl.store(out + at, narrow(tl.reshape(value, TILE, 128)), mask=inside[:, None])


@triton.jit
def _w4a8_channel_kernel(scales, channels, GROUPS: tl.constexpr, ALL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(channels + row, _channel(scales, row * GROUPS, GROUPS, ALL) * 8.0)


def _int4_output(packed: Tensor, scales: Tensor) -> Tensor:
    return torch.empty((*packed.shape[:-1], packed.shape[-1] * 8), dtype=torch.bfloat16, device=packed.device)


@op("dequantize_int4(Tensor packed, Tensor scales) -> Tensor", _int4_output)
def dequantize_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """int32 ``[..., N, K/8]``, BF16 ``[..., N, K/G]`` -> BF16 ``[..., N, K]`` = bf16(code * scale)."""
    out = _int4_output(packed, scales)
    if out.numel():
        group_size = out.shape[-1] // scales.shape[-1]
        tile = _WORDS * 8 // group_size
        grid = (triton.cdiv(scales.numel(), tile),)
        _int4_kernel[grid](
            packed.contiguous(), scales.contiguous(), out, scales.numel(), group_size, tile, num_warps=8
        )
    return out


def _row8_output(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)


@op("dequantize_row8(Tensor codes, Tensor scales) -> Tensor", _row8_output)
def dequantize_row8(codes: Tensor, scales: Tensor) -> Tensor:
    """int8 or e4m3 ``[..., N, K]``, BF16 ``[..., N, 1]`` -> BF16 ``[..., N, K]`` = bf16(code * scale)."""
    out = _row8_output(codes, scales)
    if out.numel():
        k = out.shape[-1]
        block = min(triton.next_power_of_2(k), 4096)
        grid = (out.numel() // k, triton.cdiv(k, block))
        _row8_kernel[grid](codes.contiguous(), scales.contiguous(), out, k, block, num_warps=max(block // 1024, 1))
    return out


def _launch_w4a8(packed: Tensor, scales: Tensor, out: Tensor, channels: Tensor, operand: bool) -> None:
    groups = scales.shape[-1]
    if out.numel():
        all_groups = triton.next_power_of_2(groups)
        tile = min(all_groups, 32)
        view = out.view(torch.uint8) if operand else out
        _w4a8_kernel[(scales.numel() // groups, triton.cdiv(groups, tile))](
            packed.contiguous(), scales.contiguous(), view, channels, groups, all_groups, tile, operand, num_warps=4
        )


@op("dequantize_w4a8(Tensor packed, Tensor scales) -> Tensor", _int4_output)
def dequantize_w4a8(packed: Tensor, scales: Tensor) -> Tensor:
    """As :func:`dequantize_int4` for W4A8: bf16(e4m3(code * group scale) * channel scale)."""
    out = _int4_output(packed, scales)
    _launch_w4a8(packed, scales, out, scales, False)
    return out


def _w4a8_operand(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*packed.shape[:-1], packed.shape[-1] * 8)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=packed.device)
    return out, torch.empty((*shape[:-1], 1), dtype=torch.float32, device=packed.device)


@op("w4a8_operand(Tensor packed, Tensor scales) -> (Tensor, Tensor)", _w4a8_operand)
def w4a8_operand(packed: Tensor, scales: Tensor):
    """The e4m3 matrix ``[..., N, K]`` that vLLM's W4A8 kernel multiplies, and its float32 channel scales ``[..., N, 1]``."""
    out, channels = _w4a8_operand(packed, scales)
    _launch_w4a8(packed, scales, out, channels, True)
    return out, channels


def _channel_output(scales: Tensor) -> Tensor:
    return torch.empty((*scales.shape[:-1], 1), dtype=torch.float32, device=scales.device)


@op("w4a8_channel(Tensor scales) -> Tensor", _channel_output)
def w4a8_channel(scales: Tensor) -> Tensor:
    """The float32 channel scales ``[..., N, 1]`` that go with :func:`w4a8_operand`, from group scales ``[..., N, K/128]``."""
    channels = _channel_output(scales)
    if channels.numel():
        groups = scales.shape[-1]
        _w4a8_channel_kernel[(channels.numel(),)](
            scales.contiguous(), channels, groups, triton.next_power_of_2(groups), num_warps=1
        )
    return channels
