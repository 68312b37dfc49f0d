"""The one place that chooses an implementation: torch reference now, faster kernels beside it later.

Learner and engine call these functions, so both always run the same arithmetic. Imports nothing of Ray, vLLM or
OpenRLHF. ``packed`` is a :class:`qarl_openrlhf.quant.packing.PackedWeight`.
"""

import torch
from torch import Tensor

from qarl_openrlhf.kernels import product, reference


def quantize_int4(w: Tensor, group_size: int, *, engine_grid: bool = False) -> tuple[Tensor, Tensor]:
    """``[..., N, K]`` -> (packed int32 ``[..., N, K/8]``, scale ``[..., N, K/G]``).

    engine_grid: move the scales onto vLLM's W4A8 grid before the codes are computed.
    """
    if not engine_grid:
        return reference.quantize_int4(w, group_size)
    scale = reference.w4a8_round_scales(reference.weight_scale(reference.absmax(w, group_size), 7.5))
    return reference.quantize_int4_with_scale(w, scale), scale


def quantize_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., N, K]`` -> (int8 ``[..., N, K]``, scale ``[..., N, 1]``)."""
    return reference.quantize_int8(w)


def quantize_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., N, K]`` -> (float8_e4m3fn ``[..., N, K]``, scale ``[..., N, 1]``)."""
    return reference.quantize_fp8(w)


def dequantize(packed, dtype: torch.dtype) -> Tensor:
    """Effective weight ``[..., N, K]`` in ``dtype``."""
    if packed.scheme.name == "w4a8":
        codes, channel = reference.w4a8_codes(packed.weight_packed, packed.weight_scale)
        return reference.scale_codes(codes, channel, dtype)
    codes = packed.weight if packed.weight_packed is None else reference.unpack_int4(packed.weight_packed)
    return reference.scale_codes(codes, packed.weight_scale, dtype)


def act_quant(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize activations per token: ``[..., K]`` -> (codes ``[..., K]``, float32 scale ``[..., 1]``); fmt int8 or fp8."""
    return {"int8": reference.quantize_act_int8, "fp8": reference.quantize_act_fp8}[fmt](x)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Plain ``x @ w^T + bias``, differentiable; x ``[..., K]``, w ``[N, K]``, result in x's dtype.

    w may be the float32 :func:`product.operand` copy of the weight; the same bits come out, with or without grad.
    """
    if not product.in_float32(x) and x.dtype == w.dtype:
        return torch.nn.functional.linear(x, w, bias)
    return product.PlainLinear.apply(x, w, bias)


def weight_operand(packed, dtype: torch.dtype) -> Tensor:
    """What :func:`quantized_linear` multiplies activations of ``dtype`` by; made once per weight update and kept.

    BF16 activations: the effective weight ``[N, K]``, as the plain product wants it. 8-bit activations: the weight's
    *codes* ``[N, K]`` (not scaled), in float32 on a CPU.
    """
    if packed.scheme.activation_format == "bf16":
        return product.operand(dequantize(packed, dtype), dtype)
    codes = packed.weight
    if packed.scheme.name == "w4a8":
        codes, _ = reference.w4a8_codes(packed.weight_packed, packed.weight_scale)
    return codes.float() if codes.device.type == "cpu" else codes


def quantized_linear(x: Tensor, packed, operand: Tensor | None, bias: Tensor | None, scheme) -> Tensor:
    """Low-bit forward ``[..., K] -> [..., N]`` in x's dtype, in the engine's arithmetic; no autograd.

    operand: :func:`weight_operand` of ``packed`` if it is at hand, else None (for 8-bit activations it holds codes,
    NOT the dequantized weight).
    """
    if operand is None:
        operand = weight_operand(packed, x.dtype)
    if scheme.activation_format == "bf16":
        return product.forward(x, operand, bias)
    rows = x.reshape(-1, x.shape[-1])
    codes, x_scale = act_quant(rows, scheme.activation_format)
    if scheme.activation_format == "int8":
        total = product.integer_product(codes, operand)
    else:
        total = torch.nn.functional.linear(codes.float(), operand.float())
    channel_scale, late_bias = packed.weight_scale, False
    if scheme.name == "w4a8":
        channel_scale, late_bias = reference.w4a8_engine_scales(packed.weight_scale)[1], True
    # vLLM's epilogue: x_scale * (w_scale * total) + bias in float32, rounded once; W4A8 adds the bias after rounding.
    y = x_scale * (channel_scale.float().view(1, -1) * total)
    if bias is not None and not late_bias:
        y = y + bias.float()
    y = y.to(x.dtype)
    if bias is not None and late_bias:
        y = y + bias
    return y.view(*x.shape[:-1], -1)
