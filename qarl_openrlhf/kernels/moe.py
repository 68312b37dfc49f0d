"""The routed block of a mixture-of-experts layer, for learner and engine alike: which experts, and their gated MLPs.

    y[t] = sum_j weights[t, j] * down_e(silu(gate_e(x[t])) * up_e(x[t])),    e = ids[t, j]

Shapes: T tokens, E experts, k experts a token, H hidden, I intermediate; x ``[T, H]``. Routing weights stay in float32, as in
vLLM's kernels, and the sum over a token's experts is rounded once: a routing weight rounded to BF16 first would be off by up
to 0.4 %, in every layer.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl_openrlhf.kernels import dispatch

Product = Callable[[Tensor, Tensor], Tensor]  # (rows sorted by expert [T k, K], ends int32 [E]) -> [T k, N]


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Router logits ``[T, E]`` -> (weights float32 ``[T, k]``, expert ids int64 ``[T, k]``), largest first."""
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), top_k, dim=-1)
    return weights_of(weights, renormalize), ids


def weights_of(chosen: Tensor, renormalize: bool) -> Tensor:
    """Routing weights from the float32 probabilities ``[T, k]`` of the chosen experts."""
    return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen


def experts_mlp(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Product, down: Product, experts: int) -> Tensor:
    """``[T, H] -> [T, H]`` in x's dtype; differentiable where the two products are.

    gate_up makes ``[T k, 2 I]``, the gate's rows first; down makes ``[T k, H]``.
    """
    order, inverse, ends = sort_by_expert(ids, experts)
    if dispatch.on_card(x) and fused_works(x.device):
        return dispatch.card().moe_fused.block(x, inverse, ends, weights, gate_up, down)
    return reference_block(x, order, inverse, ends, weights, gate_up, down)


@cache
def fused_works(device: torch.device) -> bool:
    """Whether ``moe_fused`` gives the reference's result and gradients on a small block here; tried once a process and device.

    If it does not, a line says so, and the reference runs. With ``--quant.kernel triton`` that is a RuntimeError. Without memory
    for the try (torch.OutOfMemoryError) nothing is known, and the next call tries again.
    """
    try:
        # Of a forward that is checkpointed, hooks are at work: what the try saves would be counted as the block's, and not come back.
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            reason = _difference(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or driver makes of the kernels
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if reason is None:
        return True
    if dispatch.kernel_setting() == "triton":
        raise RuntimeError(f"--quant.kernel triton: the fused kernels of the experts do not work on {device} ({reason}); use auto")
    print(f"note: the fused kernels of the experts do not work on {device} ({reason}): PyTorch's operations run in their place")
    return False


def _difference(device: torch.device) -> str | None:
    """What of a block of 24 tokens and 5 experts is further from the reference than BF16 rounding; None if nothing is."""
    tokens, k, experts, h, i = 24, 3, 5, 160, 96
    made = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=device)

    ids = random(tokens, experts).topk(k, -1).indices
    x, first, second = random(tokens, h).bfloat16(), random(2 * i, h).bfloat16() / 12, random(h, i).bfloat16() / 10
    weights, dy = torch.softmax(random(tokens, k), -1), random(tokens, h).bfloat16()
    order, inverse, ends = sort_by_expert(ids, experts)
    found = []
    for fused in (True, False):
        inputs = [t.clone().requires_grad_() for t in (x, weights, first, second)]
        products = [lambda rows, _, w=w: rows @ w.t() for w in inputs[2:]]
        with torch.enable_grad():
            if fused:
                y = dispatch.card().moe_fused.block(inputs[0], inverse, ends, inputs[1], *products)
            else:
                y = reference_block(inputs[0], order, inverse, ends, inputs[1], *products)
            found.append([y.detach(), *torch.autograd.grad(y, inputs, dy)])
    for name, mine, reference in zip(("output", "dx", "dweights", "dgate_up", "ddown"), *found, strict=True):
        apart = float((mine.float() - reference.float()).norm() / reference.float().norm())
        if not apart < 2**-6:
            return f"{name} is {apart:.3g} of its size from PyTorch's"
    return None


def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert ids ``[T, k]`` -> (order, its inverse: int64 ``[T k]``; ends int32 ``[E]``) of the rows sorted by expert.

    Row i of them belongs to choice ``order[i]`` of the flattened ids; expert e's rows end at ``ends[e]``.
    """
    key = torch.int16 if experts <= 2**15 else torch.int64  # a radix sort passes over the rows once for each 8 bits
    by_expert, order = ids.flatten().to(key).sort(stable=True)  # stable: a token's rows do not depend on the sort
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    ends = torch.searchsorted(by_expert, torch.arange(experts, dtype=key, device=ids.device), right=True).to(torch.int32)
    return order, inverse, ends


def reference_block(
    x: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, weights: Tensor, gate_up: Product, down: Product
) -> Tensor:
    """:func:`experts_mlp` on rows that :func:`sort_by_expert` has sorted: the definition, and what runs on a CPU."""
    tokens, k = weights.shape
    gate, up = gate_up(_SortedRows.apply(x, order, inverse, k), ends).chunk(2, -1)
    y = _TokenOrder.apply(down(F.silu(gate) * up, ends), order, inverse)
    y = y.view(tokens, k, x.shape[1]).float() * weights.float().unsqueeze(-1)
    return y.sum(1).to(x.dtype)


class _SortedRows(torch.autograd.Function):
    """A copy of its token's row for each choice, sorted by expert: [T, H] -> [T k, H].

    The gradient is gathered and summed once, in a fixed order; autograd's own would be a scatter of T k rows.
    """

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, dy):
        (inverse,) = ctx.saved_tensors
        tokens = len(inverse) // ctx.k
        return dy[inverse].view(tokens, ctx.k, dy.shape[-1]).sum(1), None, None, None


class _TokenOrder(torch.autograd.Function):
    """Sorted rows [T k, H] back in the order of tokens and choices; the gradient is the permutation the other way."""

    @staticmethod
    def forward(ctx, y, order, inverse):
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        return dy[order], None, None
