"""Which share of the low-bit codes a publish changed: whether small updates reach the sampler at all."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)


class ChangedCodes:
    """Compares the codes in one stream of published tensors with those in the stream before.

    Keeps the last codes by reference (half a byte a weight at 4 bits): every quantization makes new tensors.
    """

    def __init__(self):
        self.last: dict[str, Tensor] = {}
        self.changed = self.total = 0

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass (checkpoint name, tensor) through, counting."""
        self.changed = self.total = 0
        for name, tensor in tensors:
            packed = name.endswith(".weight_packed")
            if packed or tensor.dtype in CODE_DTYPES:
                before, self.last[name] = self.last.get(name), tensor
                self._count(before, tensor, packed)
            yield name, tensor

    def _count(self, before: Tensor | None, now: Tensor, packed: bool) -> None:
        self.total += now.numel() * (8 if packed else 1)
        if before is None:
            return
        differ = now.view(torch.uint8) ^ before.view(torch.uint8)
        halves = (differ & 0x0F, differ & 0xF0) if packed else (differ,)
        self.changed += sum(int(torch.count_nonzero(half)) for half in halves)

    @property
    def fraction(self) -> float:
        """Changed codes over all codes; 0 at the first publish and for an unquantized model."""
        return self.changed / self.total if self.total else 0.0
