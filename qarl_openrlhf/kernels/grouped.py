"""Products of MoE experts: rows of x, sorted by expert, times each expert's own weight.

    y[i] = x[i] @ W[e]^T    for rows i of expert e, which end at ends[e]

Same arithmetic as :func:`qarl_openrlhf.kernels.dispatch.quantized_linear` expert by expert, and that is the reference. On a
card one kernel does all experts: torch._grouped_mm (BF16), grouped_w8a8 (int8; e4m3 of fp8 and w4a8 on cards other than Hopper),
torch._scaled_grouped_mm (e4m3 on Hopper).
Shapes: T rows in all, E experts, x ``[T, K]``, weights ``[E, N, K]``, ends int32 ``[E]`` on x's device, ends[-1] = T.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from qarl_openrlhf.kernels import dispatch, product

HOPPER = (9, 0)  # compute capability: the only one that torch._scaled_grouped_mm with row and channel scales is written for


def forward(x: Tensor, packed, copy: Tensor | None, ends: Tensor) -> Tensor:
    """``[T, K] -> [T, N]`` in x's dtype; ``packed`` has an expert axis, ``copy`` is its weight_operand if at hand."""
    if dispatch.on_card(x, packed.weight_scale):
        return dispatch.card().grouped_linear(x, packed, copy, ends)

    def multiply(e: int, rows: Tensor) -> Tensor:
        operand = None if copy is None else copy[e]
        return dispatch.quantized_linear(rows, expert(packed, e), operand, None, packed.scheme)

    return _each_expert(x, ends, packed.shape[-2], multiply)


def plain_forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """``[T, K] -> [T, N]`` in x's dtype with unquantized weights, or their float32 :func:`product.operand`; no autograd."""
    if x.is_cuda and x.dtype == w.dtype == torch.bfloat16 and x.numel():
        return torch._grouped_mm(x.contiguous(), w.transpose(-2, -1), offs=ends)
    return _each_expert(x, ends, w.shape[-2], lambda e, rows: product.forward(rows, w[e], None))


def backward(
    dy: Tensor, x: Tensor, w: Tensor | None, ends: Tensor, needs: tuple[bool, bool], weight_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """(dX = dY W ``[T, K]``, dW = dY^T X ``[E, N, K]``) with the dequantized weight w; None where not needed."""
    if dy.is_cuda and dy.dtype == x.dtype == weight_dtype == torch.bfloat16 and dy.numel():
        dy = dy.contiguous()
        dx = torch._grouped_mm(dy, w, offs=ends) if needs[0] else None
        return dx, _weight_gradients(dy, x.contiguous(), ends) if needs[1] else None
    groups = list(zip(_by_expert(dy, ends), _by_expert(x, ends), strict=True))
    dx = _each_expert(dy, ends, x.shape[-1], lambda e, rows: product.matmul(rows, w[e], x.dtype)) if needs[0] else None
    dw = torch.stack([product.matmul(g.t(), rows, weight_dtype) for g, rows in groups]) if needs[1] else None
    return dx, dw


def _weight_gradients(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dY^T X ``[E, N, K]`` of contiguous BF16 rows on a card; 0 for experts without rows."""
    dw = torch._grouped_mm(dy.t(), x, offs=ends)
    if torch.cuda.get_device_capability(dy.device) != HOPPER:
        # Blackwell's kernel leaves memory as it was where an expert has no rows (github.com/pytorch/pytorch/issues/172439). Hopper's
        # writes zeros there (test_card.test_grouped_products), and is spared a pass over all of dW. Nothing here waits for the card.
        dw.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    return dw


def expert(packed, e: int):
    """The PackedWeight of one expert."""
    fields = {name: getattr(packed, name) for name in ("weight_packed", "weight", "weight_scale")}
    picked = {name: tensor[e] for name, tensor in fields.items() if tensor is not None}
    return dataclasses.replace(packed, shape=packed.shape[1:], **picked)


def _each_expert(x: Tensor, ends: Tensor, n: int, multiply: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``[T, n]``: ``multiply(e, rows of expert e)`` for every expert that has rows. Many have none when tokens are few."""
    y = x.new_empty((x.shape[0], n))
    start = 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            y[start:end] = multiply(e, x[start:end])
        start = end
    return y


def _by_expert(x: Tensor, ends: Tensor) -> list[Tensor]:
    edges = [0, *ends.tolist()]
    return [x[start:end] for start, end in zip(edges, edges[1:], strict=False)]


class GroupedStraightThrough(torch.autograd.Function):
    """:func:`forward` with the gradients of quant.linear.StraightThrough; saves x and the step's weight."""

    @staticmethod
    @product.exact
    def forward(ctx, x, weight, quantized, ends):
        ctx.save_for_backward(x, ends)
        ctx.quantized, ctx.weight_dtype = quantized, weight.dtype
        return forward(x, quantized.packed, quantized.forward_copy, ends)

    @staticmethod
    @product.exact
    def backward(ctx, dy):
        x, ends = ctx.saved_tensors
        w = ctx.quantized.backward_weight() if ctx.needs_input_grad[0] else None
        return *backward(dy, x, w, ends, ctx.needs_input_grad[:2], ctx.weight_dtype), None, None


class GroupedPlain(torch.autograd.Function):
    """:func:`plain_forward` with its gradients; saves x and the parameter, as an ordinary linear layer does."""

    @staticmethod
    @product.exact
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(x, weight, ends)
        return plain_forward(x, weight, ends)

    @staticmethod
    @product.exact
    def backward(ctx, dy):
        x, weight, ends = ctx.saved_tensors
        return *backward(dy, x, weight, ends, ctx.needs_input_grad[:2], weight.dtype), None
