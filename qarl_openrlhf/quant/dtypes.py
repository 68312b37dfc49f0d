"""In which dtype a layer multiplies, as nn.Linear has it: its weight's, which its input must have, or autocast's.

The low-bit products take operands of any dtypes, but not all of them give one result: a float32 input would read the dequantized
weight unrounded where nothing is kept, and rounded to BF16 where the copy is (``--quant.cache``).
"""

import torch
from torch import Tensor

from qarl_openrlhf.kernels import product
from qarl_openrlhf.quant.cache import StepWeight
from qarl_openrlhf.quant.errors import QuantError

_CAST = (torch.float32, torch.bfloat16, torch.float16)  # what autocast casts; it leaves float64 and integers


def product_dtype(x: Tensor, weight: Tensor, name: str) -> torch.dtype:
    """The dtype that x is to be converted to; QuantError naming both where nn.Linear would not multiply them, either.

    Under autocast its dtype, for weights of that dtype or of float32. nn.Linear would also round BF16 weights to FP16: a
    quantized weight would be another one then, and is refused.
    """
    cast = product.autocast_dtype(x.device) if x.dtype in _CAST else None
    if cast and weight.dtype not in (cast, torch.float32):
        raise QuantError(
            f"{name}: autocast to {cast} over a weight of {weight.dtype}: leave autocast, or let it cast to {weight.dtype}"
        )
    if not cast and x.dtype != weight.dtype:
        raise QuantError(f"{name}: the input is {x.dtype} and the weight {weight.dtype}: convert the input to {weight.dtype}")
    return cast or x.dtype


class CastWeight:
    """A float32 parameter's quantized weight for a product in another dtype, with what the products read of a StepWeight.

    The codes are those of the weight rounded to BF16 already, and the scales have BF16 values: only copies are to be rounded.
    """

    def __init__(self, held: StepWeight, dtype: torch.dtype):
        self.held, self.dtype, self.packed = held, dtype, held.packed
        codes = held.packed.scheme.activation_format != "bf16"
        self.forward_copy = held.forward_copy if codes or held.forward_copy is None else self._rounded(held.forward_copy)

    def backward_weight(self) -> Tensor:
        """W_dq as the forward used it."""
        return self._rounded(self.held.backward_weight())

    def _rounded(self, w: Tensor) -> Tensor:
        return product.operand(w.to(self.dtype), self.dtype)


def in_dtype(held: StepWeight, dtype: torch.dtype) -> StepWeight | CastWeight:
    """A step's weight for products in ``dtype``, which is :func:`product_dtype`'s."""
    return held if dtype == held.packed.weight_scale.dtype else CastWeight(held, dtype)
