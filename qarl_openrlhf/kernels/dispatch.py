"""The one place that chooses an implementation: torch reference on a CPU, Triton kernels and the library on a CUDA card.

The learner and engines on a CPU call these functions, and so run the same arithmetic; engines on GPUs multiply the same tensors with
vLLM's own kernels. Imports nothing of Ray, vLLM or OpenRLHF. ``packed`` is a :class:`qarl_openrlhf.quant.packing.PackedWeight`.
"""

from functools import cache

import torch
from torch import Tensor

from qarl_openrlhf.kernels import product, reference

KERNELS = ("auto", "triton", "torch")
_kernel = "auto"


def set_kernel(name: str) -> None:
    """``--quant.kernel``: ``auto`` (our kernels where they win, else the library's), ``triton`` (ours wherever there is
    one), ``torch`` (the references, for comparison; slow on a card). ValueError for another name."""
    global _kernel
    if name not in KERNELS:
        raise ValueError(f"--quant.kernel {name} is unknown: use one of {', '.join(KERNELS)}")
    _kernel = name


def kernel_setting() -> str:
    """What :func:`set_kernel` was given last."""
    return _kernel


def kernel_calls() -> dict[str, int]:
    """How often each kernel ran in this process; empty where Triton was never used."""
    return dict(card().calls) if card.cache_info().currsize else {}


def kernel_choices() -> str:
    """What was chosen for each shape so far, and why; empty where Triton was never used."""
    return card().choices_table() if card.cache_info().currsize else ""


@cache
def card():
    """The CUDA implementation; imported on first use, as a CPU installation need not have Triton."""
    from qarl_openrlhf.kernels import cuda

    return cuda


def on_card(*tensors: Tensor) -> bool:
    """Whether these BF16 tensors go to the kernels. Other dtypes (FP32 parameters) run the references."""
    if _kernel == "torch" or any(t.dtype != torch.bfloat16 for t in tensors):
        return False
    if tensors[0].is_cuda:
        return True
    if _kernel == "triton" and not card().INTERPRETED:
        raise ValueError("--quant.kernel triton needs a CUDA device: use auto or torch on a CPU")
    return _kernel == "triton"


def quantize(
    w: Tensor, weight_format: str, group_size: int | None = None, *, engine_grid: bool = False, copy: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``[..., N, K]`` -> (codes, scale, copy).

    weight_format int4: codes packed to int32 ``[..., N, K/8]``, scale ``[..., N, K/G]``; engine_grid moves the scales onto
    vLLM's W4A8 grid before the codes are computed. int8, fp8: codes ``[..., N, K]``, scale ``[..., N, 1]``. copy: also the
    effective weight, where one pass makes both (on a card); None elsewhere.
    """
    if on_card(w):
        return card().quantize(w, weight_format, group_size, engine_grid, copy)
    if weight_format == "int8":
        return *reference.quantize_int8(w), None
    if weight_format == "fp8":
        return *reference.quantize_fp8(w), None
    if not engine_grid:
        return *reference.quantize_int4(w, group_size), None
    scale = reference.w4a8_round_scales(reference.weight_scale(reference.absmax(w, group_size), 7.5))
    return reference.quantize_int4_with_scale(w, scale), scale, None


def dequantize(packed, dtype: torch.dtype) -> Tensor:
    """Effective weight ``[..., N, K]`` in ``dtype``."""
    if dtype == torch.bfloat16 and on_card(packed.weight_scale):
        return card().dequantize(packed)
    if packed.scheme.name == "w4a8":
        codes, channel = reference.w4a8_codes(packed.weight_packed, packed.weight_scale)
        return reference.scale_codes(codes, channel, dtype)
    codes = packed.weight if packed.weight_packed is None else reference.unpack_int4(packed.weight_packed)
    return reference.scale_codes(codes, packed.weight_scale, dtype)


def act_quant(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize activations per token: ``[..., K]`` -> (codes ``[..., K]``, float32 scale ``[..., 1]``); fmt int8 or fp8."""
    if on_card(x):
        return card().act_quant(x, fmt == "fp8")
    return {"int8": reference.quantize_act_int8, "fp8": reference.quantize_act_fp8}[fmt](x)


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    """Logits ``[N, V]``, int64 targets ``[N]`` -> float32 (log p(target), and the entropy if asked for, ``[N, 1 or 2]``;
    logsumexp of logits / temperature ``[N]``)."""
    implementation = card() if on_card(logits) else reference
    return implementation.token_log_probs(logits, targets, temperature, entropy)


def token_log_probs_backward(
    logits: Tensor, targets: Tensor, values: Tensor, lse: Tensor, grad: Tensor, temperature: float
) -> Tensor:
    """Gradient of the logits from that of :func:`token_log_probs`' values, in the logits' dtype and maybe in their place."""
    implementation = card() if on_card(logits) else reference
    return implementation.token_log_probs_backward(logits, targets, values, lse, grad, temperature)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Plain ``x @ w^T + bias``, differentiable; x ``[..., K]``, w ``[N, K]``, result in x's dtype.

    w may be the float32 :func:`product.operand` copy of the weight; the same bits come out, with or without grad.
    """
    if not product.in_float32(x) and x.dtype == w.dtype:
        return product.linear(x, w, bias)
    return product.PlainLinear.apply(x, w, bias)


def weight_operand(packed, dtype: torch.dtype) -> Tensor:
    """What :func:`quantized_linear` multiplies activations of ``dtype`` by; made once per weight update and kept.

    BF16 activations: the effective weight ``[N, K]``, as the plain product wants it. 8-bit activations: the weight's
    *codes* ``[N, K]`` (not scaled), in float32 on a CPU.
    """
    if dtype == torch.bfloat16 and on_card(packed.weight_scale):
        return card().operand(packed)
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
    if on_card(x, packed.weight_scale):
        return card().quantized_linear(x, packed, operand, bias, own=_kernel == "triton")
    if operand is None:
        operand = weight_operand(packed, x.dtype)
    if scheme.activation_format == "bf16":
        return product.forward(x, operand, bias)
    rows = x.reshape(-1, x.shape[-1])
    codes, x_scale = act_quant(rows, scheme.activation_format)
    if scheme.activation_format == "int8":
        total = product.integer_product(codes, operand)
    else:
        total = product.linear(codes.float(), operand.float())
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
    return y.view(*x.shape[:-1], y.shape[-1])
