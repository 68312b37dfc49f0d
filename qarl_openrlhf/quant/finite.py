"""Weights that are NaN or infinite: an engine samples from them without a word, and every score is 0."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qarl_openrlhf.quant.errors import QuantError

LAST = "the update that wrote them diverged; use an earlier checkpoint"


def require(tensors: Iterable[tuple[str, Tensor]], where: str = "") -> None:
    """QuantError naming the first tensor (``where``: of what) that holds a NaN or an infinity."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() and not _finite(tensor.detach()):
            bad = int((~torch.isfinite(tensor.float())).sum())
            raise QuantError(f"{where}{name}: {bad} of {tensor.numel()} values are NaN or infinite: {LAST}")


def require_in_files(directory: str | Path) -> None:
    """:func:`require` of the safetensors of a directory, one tensor in memory at a time. Nothing for other files and hub names."""
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                require(((name, file.get_tensor(name)) for name in file.keys()), f"{path}: ")  # noqa: SIM118  safe_open has no iterator
        except SafetensorError as error:
            raise QuantError(f"{path} cannot be read: {error}") from None


def _finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # no infinities; NaN is all ones behind the sign: no copy in float32
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)  # both NaN if one value is; half of what isfinite costs, and no mask in memory
    return bool(torch.isfinite(low) & torch.isfinite(high))
