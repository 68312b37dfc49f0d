"""The one matrix product of learner and engine, forward and backward.

A CPU without BF16 instructions (no AVX512-BF16, no AMX) multiplies BF16 matrices at a tenth of its float32 speed. There,
a product of BF16 operands is a float32 product of the same (exactly converted) numbers, rounded to BF16 once, which is
what BF16 hardware with float32 accumulation does as well. Everywhere else the library's own product is used.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps

import torch
import torch.nn.functional as F
from torch import Tensor

# PyTorch's own, whatever is put in the place of torch.nn.functional.linear: DeepSpeed's zero.Init replaces that by a product
# rounded to BF16 with the bias added to it afterwards, which no engine computes.
linear = torch._C._nn.linear


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has BF16 matrix instructions that torch's products use."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def in_float32(x: Tensor) -> bool:
    """Whether products with the activation x run as float32 products rounded once."""
    return x.device.type == "cpu" and x.dtype != torch.float32 and not cpu_multiplies_bf16()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast rounds a product's operands to on this kind of device; None where it is off."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Within it products are what they say: autocast would round the codes' sums, and float32 operands, to BF16."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def exact(method):
    """A Function's forward or backward, :func:`without_autocast` on the device of its first tensor."""

    @wraps(method)
    def run(ctx, first: Tensor, *others):
        with without_autocast(first.device):
            return method(ctx, first, *others)

    return run


def operand(w: Tensor, dtype: torch.dtype) -> Tensor:
    """The copy of a weight that products with activations of ``dtype`` read: worth keeping if w is used many times.

    The weight itself where the hardware multiplies it as it is, its exact float32 copy elsewhere.
    """
    slow = w.device.type == "cpu" and dtype != torch.float32 and not cpu_multiplies_bf16()
    return w.float() if slow else w


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a [M, K] @ b [K, N]``, float32 accumulation, rounded once to ``dtype``; either may be a float32 operand copy."""
    if a.dtype == b.dtype == dtype and not in_float32(a):
        return a @ b
    return (a.float() @ b.float()).to(dtype)


def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., K] @ w[N, K]^T + bias`` in x's dtype, outside autograd; w may be the float32 :func:`operand`."""
    if x.dtype == w.dtype and not in_float32(x):
        return linear(x, w, bias)
    # The bias is added in float32, before the one rounding, as a fused epilogue does.
    return linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)


def backward(
    dy: Tensor, x: Tensor, w: Tensor | None, needs: tuple[bool, bool, bool], weight_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a linear layer: dX = dY W, dW = dY^T X (in ``weight_dtype``), db = sum dY; None where not needed.

    dy [..., N], x [..., K], w [N, K] (None if dX is not needed). Sums run over all tokens in float32.
    """
    dy_rows, x_rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if in_float32(dy):
        dy_rows = dy_rows.float()  # converted once for both products
    dx = matmul(dy_rows, w, x.dtype).view_as(x) if needs[0] else None
    dw = matmul(dy_rows.t(), x_rows, weight_dtype) if needs[1] else None
    db = dy_rows.sum(0, dtype=torch.float32).to(weight_dtype) if needs[2] else None
    return dx, dw, db


class PlainLinear(torch.autograd.Function):
    """y = x W^T + b through :func:`forward`; saves the BF16 operands, not their float32 copies."""

    @staticmethod
    @exact
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return forward(x, weight, bias)

    @staticmethod
    @exact
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return backward(dy, x, weight, ctx.needs_input_grad, weight.dtype)


def integer_product(x: Tensor, w: Tensor) -> Tensor:
    """Exact ``x [M, K] @ w[N, K]^T`` of int8 codes, as float32 rounded once from the integer sum.

    w may be its float32 copy. On a CPU each slice of 1024 codes is a float32 product: its partial sums stay below
    1024 * 128 * 127 < 2^24, where float32 is exact whatever the order, and it is 50 times faster than torch._int_mm.
    """
    if x.device.type == "cuda":
        return _int_mm(x, w.to(torch.int8)).float()
    x, w = x.float(), w.float()
    with without_autocast(x.device):
        slices = [linear(a, b) for a, b in zip(x.split(1024, -1), w.split(1024, -1), strict=True)]
    if len(slices) == 1:
        return slices[0]
    return torch.stack([part.to(torch.int32) for part in slices]).sum(0, dtype=torch.int32).float()


def _int_mm(x: Tensor, w: Tensor) -> Tensor:
    rows = x.shape[0]
    if rows <= 16:  # cuBLASLt wants more than 16 rows
        x = F.pad(x, (0, 0, 0, 32 - rows))
    return torch._int_mm(x, w.t())[:rows]
