"""The arithmetic of every low-bit format, in plain torch: the definition that any faster kernel must equal.

Weights follow the compressed-tensors library (its ``calculate_qparams``, ``quantize`` and ``pack_to_int32``) byte for
byte. For a group or channel with largest magnitude ``a``, all in the weight's own dtype (BF16):

    scale = a / 7.5 (int4), a / 127.5 (int8), a / 448 (fp8 e4m3);  a zero group gets the dtype's eps
    code  = round_half_even(clamp(w / scale)),  the quotient rounded to BF16 *before* the code is

The /7.5 (not /7) uses the whole range [-8, 7]: +a becomes 7.5, which rounds to 8 and clamps to 7.

Activations follow vLLM's CUDA kernels (``dynamic_scaled_int8_quant``, ``dynamic_per_token_scaled_fp8_quant``).
Shapes: N output features, K input features, G group size, M tokens; a leading expert axis E is allowed on weights.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# vLLM's floor under every dynamic fp8 scale (min_scaling_factor): keeps an almost-zero token finite.
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)


def _number(value: float, like: Tensor) -> Tensor:
    """A constant for a division that is correctly rounded on every device.

    torch turns ``number / tensor`` into ``number * (1 / tensor)``, and on CUDA ``tensor / number`` into a product with the
    reciprocal: a last bit away from the engine's kernels, which divide.
    """
    return torch.full((), value, dtype=like.dtype, device=like.device)


# --------------------------------------------------------------------------------------------------------------- weights


def absmax(w: Tensor, group_size: int | None) -> Tensor:
    """Largest magnitude of each group ``[..., N, K/G]``, or of each row ``[..., N, 1]``; exact, in w's dtype."""
    groups = w.unflatten(-1, (-1, group_size or w.shape[-1]))
    # abs on a float32 copy: same values, and three times faster than BF16 on a CPU.
    return groups.float().abs_().amax(-1).to(w.dtype)


def weight_scale(amax: Tensor, half_range: float) -> Tensor:
    """``amax / half_range`` in amax's dtype; zeros become that dtype's eps so that 0 / scale is 0."""
    scale = amax / _number(half_range, amax)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def weight_quotient(w: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
    """``clamp(w / scale, low, high)`` ``[..., N, K]``, rounded to w's dtype; scale is ``[..., N, K/G]``."""
    groups = w.unflatten(-1, (scale.shape[-1], -1))
    return (groups / scale.unsqueeze(-1)).clamp_(low, high).flatten(-2)


def quantize_int4(w: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """``[..., N, K]`` -> (packed int32 ``[..., N, K/8]``, scale ``[..., N, K/G]``)."""
    scale = weight_scale(absmax(w, group_size), 7.5)
    return quantize_int4_with_scale(w, scale), scale


def quantize_int4_with_scale(w: Tensor, scale: Tensor) -> Tensor:
    """Packed int4 codes of w for given group scales ``[..., N, K/G]``."""
    return pack_int4(weight_quotient(w, scale, -8.0, 7.0).round_().to(torch.int8))


def quantize_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., N, K]`` -> (int8 ``[..., N, K]``, scale ``[..., N, 1]``)."""
    scale = weight_scale(absmax(w, None), 127.5)
    return weight_quotient(w, scale, -128.0, 127.0).round_().to(torch.int8), scale


def quantize_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., N, K]`` -> (float8_e4m3fn ``[..., N, K]``, scale ``[..., N, 1]``)."""
    scale = weight_scale(absmax(w, None), FP8_MAX)
    # The library adds its (zero) zero point to the quotient, which turns -0.0 into +0.0; the byte differs otherwise.
    return weight_quotient(w, scale, -FP8_MAX, FP8_MAX).add_(0.0).to(FP8), scale


def pack_int4(codes: Tensor) -> Tensor:
    """int8 codes in [-8, 7] ``[..., K]`` -> int32 ``[..., K/8]``: nibble = code + 8, lowest nibble = lowest K."""
    # Two neighbouring codes read as one little-endian int16: bits 0-3 are the even one, bits 8-11 the odd one.
    pairs = (codes + 8).contiguous().view(torch.int16)
    return ((pairs & 15) | (pairs >> 4)).to(torch.uint8).view(torch.int32)


def unpack_int4(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_int4`: int32 ``[..., K/8]`` -> int8 ``[..., K]``."""
    pairs = packed.contiguous().view(torch.uint8).to(torch.int16)
    return ((pairs | (pairs << 4)) & 0x0F0F).view(torch.int8) - 8


def scale_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``code * scale`` rounded once to dtype; codes ``[..., N, K]`` of any type, scale ``[..., N, K/G]``."""
    # A BF16 product of BF16 operands is the exact product rounded once, and it is the fast path.
    work = torch.bfloat16 if dtype == scale.dtype == torch.bfloat16 else torch.float32
    groups = codes.to(work).unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.to(work).unsqueeze(-1)).flatten(-2).to(dtype)


# ------------------------------------------------------------------------------------- w4a8: the scales Hopper can hold


def w4a8_engine_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """What vLLM's Hopper W4A8 kernel makes of stored group scales (``convert_bf16_scales_to_fp8``).

    scale ``[..., N, K/128]`` -> (e4m3 group scales of the same shape, float32 channel scales ``[..., N, 1]``). The
    kernel multiplies a code by e4m3(s / c) / 8 and the accumulator by 8 c, c = max(amax_row(s) / 448, floor).
    """
    amax = scale.float().amax(-1, keepdim=True)
    channel = (amax / _number(FP8_MAX, amax)).clamp_(min=FP8_MIN_SCALE)
    group = (scale.float() / channel).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return (group.float() / 8.0).to(FP8), channel * 8.0


def w4a8_round_scales(scale: Tensor) -> Tensor:
    """Move group scales onto the engine's grid, so that :func:`w4a8_engine_scales` gives them back unchanged.

    A group more than 2^16 times smaller than its row's largest would get an engine scale of zero (and a division by
    zero here); it takes the smallest scale instead.
    """
    group, channel = w4a8_engine_scales(scale)
    smallest = 2.0**-9  # of e4m3fn
    return (group.float().clamp_(min=smallest) * channel).to(scale.dtype)


def w4a8_codes(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The operand the kernel multiplies: (e4m3 ``[..., N, K]``, float32 channel scales ``[..., N, 1]``).

    The kernel looks code * group_scale up in a table of e4m3 numbers, so the product itself is rounded to e4m3:
    7 * 1.125 is 8. The effective weight is this operand times the channel scale.
    """
    group, channel = w4a8_engine_scales(scale)
    return scale_codes(unpack_int4(packed), group.float(), torch.float32).to(FP8), channel


# ----------------------------------------------------------------------------------------------------------- activations


def quantize_act_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: ``[..., K]`` -> (int8 ``[..., K]``, float32 scale ``[..., 1]`` = amax / 127). A zero token has scale 0."""
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    # The kernel multiplies by 127 / amax (it does not divide by the scale), which decides ties.
    inverse = torch.where(amax == 0, 0.0, _number(127.0, amax) / amax)
    return (x * inverse).round_().clamp_(-128, 127).to(torch.int8), amax / _number(127.0, amax)


def quantize_act_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: ``[..., K]`` -> (float8_e4m3fn ``[..., K]``, float32 scale ``[..., 1]`` = max(amax / 448, floor))."""
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = (amax / _number(FP8_MAX, amax)).clamp_(min=FP8_MIN_SCALE)
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    """Logits [N, V], int64 targets [N] -> float32 (log p(target) and, if asked for, the entropy [N, 1 or 2]; logsumexp z [N])."""
    z = _scaled(logits, temperature)
    lse = torch.logsumexp(z, -1)
    values = [z.gather(-1, targets[:, None])[:, 0] - lse]
    if entropy:
        values.append(lse - (torch.softmax(z, -1) * z).sum(-1))
    return torch.stack(values, -1), lse


def token_log_probs_backward(
    logits: Tensor, targets: Tensor, values: Tensor, lse: Tensor, grad: Tensor, temperature: float
) -> Tensor:
    """Gradient of the logits in their dtype, from that of ``values``; see :mod:`qarl_openrlhf.kernels.token_log_probs`."""
    log_p = _scaled(logits, temperature).sub_(lse[:, None])
    by_log_prob = grad[:, 0:1]
    if grad.shape[1] == 1:
        d_logits = log_p.exp_().mul_(-by_log_prob)
    else:
        p = log_p.exp()
        d_logits = log_p.add_(values[:, 1:2]).mul_(-grad[:, 1:2]).sub_(by_log_prob).mul_(p)
    return d_logits.scatter_add_(-1, targets[:, None], by_log_prob).div_(temperature).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy of the logits over the temperature."""
    z = logits.to(torch.float32, copy=True)
    return z if temperature == 1.0 else z.div_(temperature)
