"""Weights in checkpoint form: what the learner's forward reads, the publisher sends and `vllm serve` loads.

There is one quantizer, :func:`quantize_weight`. Nothing is ever quantized twice: with the /7.5 scale, quantizing a
dequantized weight gives other codes (the group's maximum has become 7 * scale).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_openrlhf.kernels import dispatch
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.scheme import QuantScheme


@dataclass(frozen=True)
class PackedWeight:
    """One quantized weight; fields carry the checkpoint's tensor names, absent ones are None.

    | weight format | tensors |
    |---|---|
    | int4 | weight_packed int32 [N, K/8], weight_scale [N, K/G], weight_shape int64 [2] = (N, K) |
    | int8 | weight int8 [N, K], weight_scale [N, 1] |
    | fp8  | weight float8_e4m3fn [N, K], weight_scale [N, 1] |

    Scales hold BF16 values in the model's dtype. A leading expert axis E is allowed on all but weight_shape.
    """

    scheme: QuantScheme
    shape: tuple[int, ...]
    weight_scale: Tensor
    weight_packed: Tensor | None = None
    weight: Tensor | None = None
    weight_shape: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Checkpoint suffix -> tensor, in the order in which they are sent and stored."""
        names = ("weight_packed", "weight", "weight_scale", "weight_shape")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def changed_codes(self, old: "PackedWeight") -> tuple[int, int]:
        """(codes that differ from ``old``, codes in all); QuantError if the two are not of one layer and scheme."""
        if old.scheme != self.scheme or old.shape != self.shape:
            raise QuantError(f"cannot compare {old.scheme} {old.shape} with {self.scheme} {self.shape}")
        if self.weight_packed is not None:
            differ = (old.weight_packed ^ self.weight_packed).view(torch.uint8)
            changed = torch.count_nonzero(differ & 0x0F) + torch.count_nonzero(differ & 0xF0)
        else:
            changed = torch.count_nonzero(old.weight.view(torch.uint8) != self.weight.view(torch.uint8))
        return int(changed), math.prod(self.shape)


def quantize_weight(w: Tensor, scheme: QuantScheme, *, name: str = "weight") -> PackedWeight:
    """Quantize ``w`` [N, K] (or [E, N, K]) of dtype bfloat16, float16 or float32 as the compressed-tensors library does.

    A float32 weight is rounded to BF16 first, as the BF16 parameter of a training run is; its scales are stored in
    float32. QuantError, naming ``name``, if the scheme has no quantizer, K does not fit, or a value is NaN or infinite.
    """
    return quantize_with_copy(w, scheme, name=name, copy=False)[0]


@torch.no_grad()
def quantize_with_copy(
    w: Tensor, scheme: QuantScheme, *, name: str, copy: bool, check: bool = True
) -> tuple[PackedWeight, Tensor | None]:
    """:func:`quantize_weight`, and the dequantized weight if asked for and made in the same pass (on a card; else None).

    check False: the caller owes a :func:`require_finite`, for many layers at once, as each check waits for the device.
    """
    if not scheme.quantized:
        raise QuantError(f"{name}: scheme {scheme} has no quantized weights")
    if w.dim() not in (2, 3) or w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise QuantError(f"{name}: expected a float weight [N, K] or [E, N, K], got {w.dtype} {list(w.shape)}")
    shape, dtype = tuple(w.shape), w.dtype
    if shape[-1] == 0:
        raise QuantError(f"{name}: {list(shape)} has rows without weights, of which no scale can be made")
    if scheme.group_size and shape[-1] % scheme.group_size:
        scheme.check_layer(name, shape[-2], shape[-1])
    values = w.detach().to(torch.bfloat16) if dtype == torch.float32 else w.detach()
    codes, scale, dequantized = dispatch.quantize(
        values,
        scheme.weight_format,
        scheme.group_size,
        engine_grid=scheme.name == "w4a8",
        copy=copy and dtype == torch.bfloat16,
    )
    fields = {"weight": codes}
    if scheme.weight_format == "int4":
        fields = {"weight_packed": codes, "weight_shape": torch.tensor(shape[-2:], dtype=torch.int64)}
    if check and not torch.isfinite(scale).all():
        bad, given = (int((~torch.isfinite(t)).sum()) for t in (values, w))
        large = f" as BF16 ({bad - given} of them are too large for it)" if bad > given else ""
        raise QuantError(f"{name}: {bad} of {w.numel()} weights are NaN or infinite{large}; the update that wrote them diverged")
    return PackedWeight(scheme, shape, scale.to(dtype), **fields), dequantized


def require_finite(scales: dict[str, Tensor]) -> None:
    """QuantError naming the layers in whose weights a NaN or infinity is; costs one synchronisation with the device.

    scales: layer name -> weight_scale. A NaN or infinity anywhere in a group makes its scale NaN or infinite, so checking
    the scales checks every weight.
    """
    if not scales:
        return
    largest = torch.stack(torch._foreach_norm([s.detach() for s in scales.values()], float("inf")))
    finite = torch.isfinite(largest).tolist()
    bad = [name for name, good in zip(scales, finite, strict=True) if not good]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise QuantError(f"{', '.join(bad[:3])}{more}: a weight is NaN or infinite; the update that wrote it diverged")


def dequantize_weight(packed: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The effective weight [N, K] (or [E, N, K]) that the engine multiplies by, rounded once to ``dtype``.

    int4, int8, fp8: code * scale. w4a8: the e4m3 product code * group scale of the Hopper kernel times its channel scale.
    """
    return dispatch.dequantize(packed, dtype)


def count_changed_codes(old: PackedWeight, new: PackedWeight) -> tuple[int, int]:
    """(codes that differ, codes in all) between two quantizations of one layer; a scale that moved does not count."""
    return new.changed_codes(old)
