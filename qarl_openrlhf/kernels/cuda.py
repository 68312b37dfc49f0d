"""The low-bit forward on a CUDA card: which kernel runs which product, and why.

| scheme | forward |
|---|---|
| w4a16 | the BF16 copy of the weight, where it is kept or made in one pass, times the library's product; few rows without a copy: w4a16_gemm |
| w8a8 | act_quant, then w8a8_gemm (the library's INT8 product writes int32 and needs another pass); before Hopper the library's |
| fp8, w4a8 | act_quant, then torch._scaled_mm with row and channel scales; w8a8_gemm for shapes that it does not take |
| experts | w4a16: torch._grouped_mm; w8a8: grouped_w8a8; fp8, w4a8: torch._scaled_grouped_mm on Hopper, grouped_w8a8 elsewhere |

Numbers behind these choices: docs/kernels.md. ``choices`` keeps what was chosen for each shape, for ``auto`` to print.
"""

import logging
import weakref

import torch
from torch import Tensor

from qarl_openrlhf.kernels import moe_fused as moe_fused
from qarl_openrlhf.kernels import grouped, product
from qarl_openrlhf.kernels.act_quant import act_quant
from qarl_openrlhf.kernels.dequantize import dequantize_int4, dequantize_row8, dequantize_w4a8, w4a8_channel, w4a8_operand
from qarl_openrlhf.kernels.grouped_gemm import grouped_w8a8
from qarl_openrlhf.kernels.library import INTERPRETED, calls
from qarl_openrlhf.kernels.quantize_pack import quantize_int4, quantize_row8, quantize_w4a8
from qarl_openrlhf.kernels.token_log_probs import token_log_probs as token_log_probs
from qarl_openrlhf.kernels.token_log_probs import token_log_probs_backward_
from qarl_openrlhf.kernels.tune import bucket
from qarl_openrlhf.kernels.w4a16_gemm import MAX_ROWS, w4a16_gemm
from qarl_openrlhf.kernels.w8a8_gemm import w8a8_gemm

log = logging.getLogger(__name__)
choices: dict[tuple, tuple[str, str]] = {}  # (scheme, M rounded up, N, K) -> (kernel, why)


def require(scheme_name: str, capability: tuple[int, int], card: str) -> None:
    """QuantError for schemes whose products this card has no instructions for."""
    if scheme_name in ("fp8", "w4a8") and capability < (8, 9):
        from qarl_openrlhf.quant.errors import QuantError  # quant imports kernels

        raise QuantError(
            f"scheme {scheme_name} needs FP8 tensor cores (compute capability 8.9 or newer: Ada, Hopper, Blackwell), but "
            f"{card} has {capability[0]}.{capability[1]}: use w8a8 or w4a16 on it"
        )


def _require(scheme_name: str, device: torch.device) -> None:
    if device.type == "cuda":
        require(scheme_name, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def _hopper(device: torch.device) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] >= 9


# --------------------------------------------------------------------------------------------------------------- weights


def quantize(w: Tensor, weight_format: str, group_size: int | None, engine_grid: bool, copy: bool):
    """BF16 ``[..., N, K]`` -> (codes or packed words, scale, W_dq or None)."""
    if weight_format == "int4":
        out = quantize_w4a8(w, copy) if engine_grid else quantize_int4(w, group_size, copy)
    else:
        _require("fp8" if weight_format == "fp8" else "w8a8", w.device)
        out = quantize_row8(w, weight_format == "fp8", copy)
    return out[0], out[1], out[2] if copy else None


def dequantize(packed) -> Tensor:
    """Effective weight, BF16."""
    if packed.scheme.name == "w4a8":
        _require("w4a8", packed.weight_packed.device)
        return dequantize_w4a8(packed.weight_packed, packed.weight_scale)
    if packed.weight_packed is not None:
        return dequantize_int4(packed.weight_packed, packed.weight_scale)
    return dequantize_row8(packed.weight, packed.weight_scale)


def operand(packed) -> Tensor:
    """What :func:`quantized_linear` multiplies by: BF16 W_dq (w4a16), else 8-bit codes."""
    if packed.scheme.activation_format == "bf16":
        return dequantize(packed)
    if packed.scheme.name == "w4a8":
        return w4a8_operand(packed.weight_packed, packed.weight_scale)[0]
    return packed.weight


# ----------------------------------------------------------------------------------------------------------- activations

_shared: tuple | None = None  # (weak reference to x, its version, format, (codes, scale))


def shared_act_quant(x: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    """:func:`act_quant`, done once for sibling projections (q, k, v; gate, up) that get the very same tensor.

    Remembers the last tensor only, and lets go of its codes as soon as the tensor is freed or written to.
    """
    global _shared
    if torch.compiler.is_compiling() or x.is_inference():
        return act_quant(x, fp8)
    last = _shared
    if last is not None and last[0]() is x and last[1:3] == (x._version, fp8):
        calls["act_quant_shared"] += 1
        return last[3]
    result = act_quant(x, fp8)
    _shared = (weakref.ref(x, _forget), x._version, fp8, result)
    return result


def _forget(reference) -> None:
    global _shared
    if _shared is not None and _shared[0] is reference:
        _shared = None


# --------------------------------------------------------------------------------------------------------------- forward


def quantized_linear(x: Tensor, packed, copy: Tensor | None, bias: Tensor | None, own: bool) -> Tensor:
    """Low-bit forward ``[..., K] -> [..., N]``, BF16; ``copy`` is :func:`operand` if at hand. own: prefer our kernels."""
    scheme, (n, k) = packed.scheme, packed.shape[-2:]
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], n))
    m = x.numel() // k
    if scheme.activation_format == "bf16":
        return _w4a16(x, packed, copy, bias, m, n, k)
    _require(scheme.name, x.device)
    codes, x_scale = shared_act_quant(x, scheme.activation_format == "fp8")
    codes, x_scale = codes.view(m, k), x_scale.view(m, 1)
    copy, channel = _eight_bit_weight(packed, copy)
    late_bias = scheme.name == "w4a8"  # vLLM's W4A8 kernel adds it after rounding
    kernel, why = _eight_bit_kernel(scheme.activation_format, n, k, own, x.device)
    _note(scheme, m, n, k, kernel, why)
    if kernel == "w8a8_gemm":
        y = w8a8_gemm(codes, x_scale, copy, channel, bias, late_bias)
    elif kernel == "_scaled_mm":
        inside = None if late_bias else bias
        y = torch._scaled_mm(
            codes, copy.t(), x_scale, channel.t(), bias=inside, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        if late_bias and bias is not None:
            y += bias
    else:
        y = x_scale * (channel.t() * product.integer_product(codes, copy))
        y = (y if bias is None else y + bias.float()).to(torch.bfloat16)
    return y.view(*x.shape[:-1], n)


def _eight_bit_weight(packed, copy: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes ``[..., N, K]``, float32 channel scales ``[..., N, 1]``)."""
    if packed.scheme.name != "w4a8":
        return packed.weight, _float_scale(packed.weight_scale)
    if copy is None:
        return w4a8_operand(packed.weight_packed, packed.weight_scale)
    return copy, w4a8_channel(packed.weight_scale)


_float_scales: dict[int, tuple] = {}  # id of a scale -> (weak reference to it, its version, its float32 copy)


def _float_scale(scale: Tensor) -> Tensor:
    """The scale in float32, as the products want it; converted once as long as the scale lives and is not written to."""
    if torch.compiler.is_compiling() or scale.is_inference():
        return scale.float()
    key = id(scale)
    held = _float_scales.get(key)
    if held is None or held[0]() is not scale or held[1] != scale._version:
        held = (weakref.ref(scale, lambda _: _float_scales.pop(key, None)), scale._version, scale.float())
        _float_scales[key] = held
    return held[2]


def _w4a16(x: Tensor, packed, copy: Tensor | None, bias: Tensor | None, m: int, n: int, k: int) -> Tensor:
    if copy is None and m <= MAX_ROWS and k % 32 == 0:
        _note(packed.scheme, m, n, k, "w4a16_gemm", f"at most {MAX_ROWS} rows read a quarter of the bytes")
        y = w4a16_gemm(x.reshape(m, k), packed.weight_packed, packed.weight_scale, bias)
        return y.view(*x.shape[:-1], n)
    why = "the copy is kept" if copy is not None else "dequantizing costs little beside this many rows"
    _note(packed.scheme, m, n, k, "library BF16", why)
    return product.linear(x, dequantize(packed) if copy is None else copy, bias)


def grouped_linear(x: Tensor, packed, copy: Tensor | None, ends: Tensor) -> Tensor:
    """:func:`qarl_openrlhf.kernels.grouped.forward` on a card; BF16."""
    scheme, (e, n, k) = packed.scheme, packed.shape
    if x.numel() == 0:
        return x.new_empty((0, n))
    if scheme.activation_format == "bf16":
        copy = dequantize(packed) if copy is None else copy
        _note(scheme, x.shape[0], n, k, "library BF16 grouped", f"{e} experts, on the dequantized copy")
        return torch._grouped_mm(x.contiguous(), copy.transpose(-2, -1), offs=ends)
    _require(scheme.name, x.device)
    codes, x_scale = shared_act_quant(x, scheme.activation_format == "fp8")
    copy, channel = _eight_bit_weight(packed, copy)
    kernel, why = _grouped_kernel(scheme.activation_format, n, k, x.device)
    _note(scheme, x.shape[0], n, k, kernel, why)
    if kernel == "grouped_w8a8":
        return grouped_w8a8(codes, x_scale, copy, channel, ends)
    return torch._scaled_grouped_mm(
        codes, copy.transpose(-2, -1), x_scale.view(-1), channel.view(e, n), offs=ends, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


def _grouped_kernel(fmt: str, n: int, k: int, device: torch.device) -> tuple[str, str]:
    if fmt == "int8":
        return "grouped_w8a8", "the library has no grouped INT8 product"
    if INTERPRETED or torch.cuda.get_device_capability(device) != grouped.HOPPER:
        return "grouped_w8a8", "the library's grouped FP8 product is for Hopper"
    if n % 16 or k % 16:
        return "grouped_w8a8", "the library wants N and K in multiples of 16"
    return "_scaled_grouped_mm", "the library's, for Hopper"


def _eight_bit_kernel(fmt: str, n: int, k: int, own: bool, device: torch.device) -> tuple[str, str]:
    if fmt == "int8":
        if _hopper(device):
            return "w8a8_gemm", "scales in the epilogue; the library's product writes int32"
        return "_int_mm", "w8a8_gemm needs Hopper's TMA"
    if own and _hopper(device):
        return "w8a8_gemm", "asked for"
    if n % 16 or k % 16:
        return "w8a8_gemm", "the library wants N and K in multiples of 16"
    return "_scaled_mm", "the library's FP8 product is 1.1 to 1.2 times as fast as ours"


def _note(scheme, m: int, n: int, k: int, kernel: str, why: str) -> None:
    key = (str(scheme), bucket(m), n, k)
    if choices.get(key) != (kernel, why):
        choices[key] = (kernel, why)
        log.info("%s, up to %d rows, [%d, %d]: %s (%s)", *key, kernel, why)
    calls[kernel if kernel.startswith("library") or kernel.startswith("_") else f"chose {kernel}"] += 1


def token_log_probs_backward(
    logits: Tensor, targets: Tensor, values: Tensor, lse: Tensor, grad: Tensor, temperature: float
) -> Tensor:
    """The logits, overwritten with their gradient."""
    token_log_probs_backward_(logits, targets, values, lse, grad, temperature)
    return logits


def choices_table() -> str:
    """What was chosen for each shape so far, one line each."""
    rows = [("scheme", "rows", "[N, K]", "kernel", "why")]
    rows += [(s, f"<= {m}", f"[{n}, {k}]", kernel, why) for (s, m, n, k), (kernel, why) in sorted(choices.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows)
