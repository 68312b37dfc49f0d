"""The quantized weights of one optimizer step, made once and read by every micro-batch, the publisher and the export.

    mode     kept for the step                                             bytes a weight (w4a16, BF16 model)
    packed   the packed tensors; products dequantize them                  0.53
    dequant  also the copies the products read                             + 2 (+ 4 on a CPU that multiplies in float32)
    none     nothing: every forward quantizes                              0

The packed bytes are the same in all three. A write to the parameter that autograd can see (``param._version``) makes a
cached weight stale by itself, and so do another parameter in its place (``load_state_dict(assign=True)``), another dtype or
device, and a step of the PyTorch optimizer that holds the parameter: the fused ones write where autograd does not look.
DeepSpeed's optimizers hold copies and write through ``.data``: whoever runs their step or loads a checkpoint calls
:meth:`QuantCache.invalidate`.
"""

import time
import weakref
from dataclasses import dataclass

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from qarl_openrlhf.kernels import dispatch, product
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.packing import PackedWeight, quantize_with_copy, require_finite

MODES = ("packed", "dequant", "none")


@dataclass
class QuantStats:
    """Totals since the model was converted: calls of the quantizer (one a layer) and the seconds they took."""

    quantize_calls: int = 0
    seconds: float = 0.0


class StepWeight:
    """One layer's quantized weight for one optimizer step, with or without the copies the products read."""

    _source: weakref.ref | None = None  # the parameter; ids are used again
    _kind: tuple | None = None  # its dtype and device

    def __init__(self, packed: PackedWeight, version: int, keep_copies: bool, dequantized: Tensor | None = None):
        self.packed = packed
        self.version = version
        self.forward_copy = self.backward_copy = None
        if keep_copies:
            self.backward_copy = self._dequantized() if dequantized is None else dequantized
            same = packed.scheme.activation_format == "bf16"
            dtype = packed.weight_scale.dtype
            self.forward_copy = self.backward_copy if same else dispatch.weight_operand(packed, dtype)

    @property
    def source(self) -> Tensor | None:
        """The parameter it was made from, as long as that lives."""
        return None if self._source is None else self._source()

    def made_from(self, weight: Tensor) -> "StepWeight":
        """Itself, and from now on :meth:`is_of` knows the parameter."""
        self._source, self._kind = weakref.ref(weight), (weight.dtype, weight.device)
        return self

    def is_of(self, weight: Tensor) -> bool:
        """Whether it is the quantized form of this parameter as it is now.

        The storage is not compared: ZeRO-3 gathers into another one each time, and a learner that slept wakes in another one.
        What ZeRO-3 leaves of a partitioned parameter, no values somewhere, is none the staler for its device.
        """
        if self.source is not weight or self.version != weight._version:
            return False
        return weight.numel() == 0 or self._kind == (weight.dtype, weight.device)

    def _dequantized(self) -> Tensor:
        dtype = self.packed.weight_scale.dtype
        return product.operand(dispatch.dequantize(self.packed, dtype), dtype)

    def backward_weight(self) -> Tensor:
        """W_dq [N, K] for dX = dY W_dq: the kept copy, or dequantized now. Never reads the parameter."""
        return self._dequantized() if self.backward_copy is None else self.backward_copy

    @property
    def nbytes(self) -> int:
        tensors = [*self.packed.tensors().values(), self.forward_copy, self.backward_copy]
        return sum(t.nbytes for t in {id(t): t for t in tensors if t is not None}.values())


class QuantCache:
    """The step weights of one model, by layer name; ``model.quant_cache``.

    ``quantized_forward`` (see :func:`qarl_openrlhf.quant.linear.quantized_forward`) makes ``:rollout`` layers use them too.
    """

    def __init__(self, mode: str = "packed"):
        if mode not in MODES:
            raise QuantError(f"quant cache mode {mode!r} is unknown: use one of {', '.join(MODES)}")
        self.mode = mode
        self.stats = QuantStats()
        self.quantized_forward = False
        self._weights: dict[str, StepWeight] = {}
        self._unchecked: dict[str, Tensor] = {}
        _caches.add(self)

    def __reduce__(self):
        return (QuantCache, (self.mode,))  # a copied or pickled model starts with an empty cache

    def holds(self, name: str, weight: Tensor) -> bool:
        """Whether the quantized form of this parameter is at hand; never reads its values."""
        held = self._weights.get(name)
        return held is not None and held.is_of(weight)

    def step_weight(self, name: str, weight: Tensor, scheme) -> StepWeight:
        """The quantized weight of a layer, quantizing it if this step has not yet. A hit never touches ``weight.data``."""
        if self.holds(name, weight):
            return self._weights[name]
        if weight.numel() == 0 and getattr(weight, "ds_shape", weight.shape).numel() > 0:
            raise QuantError(f"{name}: the weight is partitioned (ZeRO-3) and not in the cache; gather it first")
        started = time.perf_counter()
        keep_copies = self.mode == "dequant"
        packed, dequantized = quantize_with_copy(
            weight, scheme, name=name, copy=keep_copies, check=not weight.is_cuda
        )
        if weight.is_cuda:
            self._unchecked[name] = packed.weight_scale
        self.stats.quantize_calls += 1
        self.stats.seconds += time.perf_counter() - started
        made = StepWeight(packed, weight._version, keep_copies, dequantized).made_from(weight)
        if self.mode != "none":
            self._weights[name] = made
        return made

    def require_finite(self) -> None:
        """QuantError naming the layers quantized since the last call whose weights are NaN or infinite.

        A check waits for the device. On a card it is therefore made once for all layers, when they are published, and not
        layer by layer in the forward.
        """
        unchecked, self._unchecked = self._unchecked, {}
        require_finite(unchecked)

    def invalidate(self) -> None:
        """Forget all weights: call after an optimizer step and after anything else that wrote the parameters."""
        self._weights.clear()
        self._unchecked.clear()

    def forget(self, parameters: set[int]) -> None:
        """Forget the weights that were made from the parameters of these ids, or from some that are gone."""
        self._weights = {
            name: held for name, held in self._weights.items() if (source := held.source) is not None and id(source) not in parameters
        }

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._weights.values())


_caches: "weakref.WeakSet[QuantCache]" = weakref.WeakSet()


def _after_step(optimizer, *_) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for cache in _caches:
        cache.forget(stepped)


register_optimizer_step_post_hook(_after_step)
