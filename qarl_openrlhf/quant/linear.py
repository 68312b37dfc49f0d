"""An nn.Linear whose forward runs the engine's low-bit weights and arithmetic, and whose backward is full precision.

QaRL (arXiv 2604.07853), section "rollout-aligned training". With master weight W (BF16), codes and scales W_q, and
effective weight W_dq:

    forward    y  = x_q W_q^T + b          exactly the engine's arithmetic
    backward   dX = dY W_dq                the weight that the forward used
               dW = dY^T X                 straight through the rounding, onto the master weight; X in BF16

Scales are constants and nothing is masked: a weight whose code clamps still gets its gradient.

The layer is made by swapping the class of an existing nn.Linear, so parameters, names, tied weights, hooks, ZeRO-3's
partitioned parameters and ``state_dict`` stay exactly as they were.
"""

from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qarl_openrlhf.kernels import dispatch, product
from qarl_openrlhf.quant.cache import QuantCache, StepWeight
from qarl_openrlhf.quant.dtypes import CastWeight, in_dtype, product_dtype
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.packing import PackedWeight
from qarl_openrlhf.quant.scheme import QuantScheme


class StraightThrough(torch.autograd.Function):
    """The low-bit product with the gradients above. Saves x and the step's quantized weight, never the parameter."""

    @staticmethod
    @product.exact
    def forward(ctx, x, weight, bias, quantized: StepWeight | CastWeight):
        ctx.save_for_backward(x)
        ctx.quantized = quantized
        ctx.weight_dtype = weight.dtype
        packed = quantized.packed
        return dispatch.quantized_linear(x, packed, quantized.forward_copy, bias, packed.scheme)

    @staticmethod
    @product.exact
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        w = ctx.quantized.backward_weight() if ctx.needs_input_grad[0] else None
        return *product.backward(dy, x, w, ctx.needs_input_grad[:3], ctx.weight_dtype), None


class QuantLinear(nn.Linear):
    """x [..., K] -> [..., N]. ``scheme`` None means a plain product (lm_head, router gates).

    x is of the weight's dtype, or under autocast: :mod:`qarl_openrlhf.quant.dtypes`.
    """

    scheme: QuantScheme | None
    quant_name: str
    quant_cache: QuantCache

    @classmethod
    def convert(cls, linear: nn.Linear, scheme: QuantScheme | None, *, name: str, cache: QuantCache) -> "QuantLinear":
        """Turn ``linear`` into a QuantLinear in place. QuantError if its class is not exactly nn.Linear."""
        cls.check(linear, name)
        linear.__class__ = cls
        linear.scheme = scheme if scheme is not None and scheme.quantized else None
        linear.quant_name = name
        linear.quant_cache = cache
        return linear

    @staticmethod
    def check(linear: nn.Module, name: str) -> None:
        if type(linear) is not nn.Linear:
            raise QuantError(
                f"layer {name} is a {type(linear).__name__}, not a plain nn.Linear; load the model in BF16 without "
                "adapters or another quantization, and convert it once"
            )

    def packed(self) -> PackedWeight:
        """The quantized parameter, at most one quantization an optimizer step. Under ZeRO-3, gather the weight on a miss."""
        return self.quant_cache.step_weight(self.quant_name, self.weight, self.scheme).packed

    def is_packed(self) -> bool:
        """Whether :meth:`packed` would be served from the cache."""
        return self.quant_cache.holds(self.quant_name, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        plain = self.scheme is None or not (self.scheme.aligned or self.quant_cache.quantized_forward)
        dtype = product_dtype(x, self.weight, self.quant_name)
        if plain and dtype != self.weight.dtype:
            return product.linear(x, self.weight, self.bias)  # autocast rounds a float32 weight once for all its products
        bias = None if self.bias is None else self.bias.to(dtype)
        if plain:
            return dispatch.linear(x.to(dtype), self.weight, bias)
        quantized = self.quant_cache.step_weight(self.quant_name, self.weight, self.scheme)
        return StraightThrough.apply(x.to(dtype), self.weight, bias, in_dtype(quantized, dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme or 'none'}"


@contextmanager
def quantized_forward(model: nn.Module):
    """Within it every quantized layer of a converted model, ``:rollout`` ones too, computes as the engine does."""
    cache: QuantCache = model.quant_cache
    before, cache.quantized_forward = cache.quantized_forward, True
    try:
        yield
    finally:
        cache.quantized_forward = before
