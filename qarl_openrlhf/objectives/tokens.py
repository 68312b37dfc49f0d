"""What an objective made of each token, for histograms and for reading single responses. Detached, on the batch's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Batch, Surrogate
from .weights import MismatchWeight

REGIONS = ("below", "inside", "above", "rejected")


@dataclass(frozen=True)
class TokenStates:
    """All [B, T]; entries outside ``mask`` mean nothing. A response's state is that of each of its tokens.

    ``region`` (int64): index into REGIONS: the ratio below, inside or above the band of the advantage's sign, or the
    response rejected by its mismatch weight, wherever its ratio is.
    ``weight`` (float32): the mismatch weight.
    """

    mask: Tensor
    region: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Outcome:
    """What a call of an objective remembers of its units (tokens [B, T] or responses [B]): no graph, nothing copied."""

    mask: Tensor
    weight: Tensor
    below: Tensor | None
    above: Tensor | None
    rejected: Tensor | None

    @classmethod
    def of(cls, batch: Batch, surrogate: Surrogate, weight: MismatchWeight) -> Outcome:
        return cls(batch.mask, weight.values.detach(), surrogate.below, surrogate.above, weight.rejected)

    def tokens(self) -> TokenStates:
        """Units that are responses, spread over their tokens."""
        region = torch.full(self.mask.shape, REGIONS.index("inside"), device=self.mask.device)
        for name in ("below", "above", "rejected"):
            flags = getattr(self, name)
            if flags is not None:
                region = torch.where(self._spread(flags), REGIONS.index(name), region)
        return TokenStates(self.mask, region, self._spread(self.weight))

    def _spread(self, units: Tensor) -> Tensor:
        return (units[:, None] if units.ndim == 1 else units).expand_as(self.mask)
