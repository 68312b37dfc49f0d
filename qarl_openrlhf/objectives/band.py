"""Trust bands by the sign of the advantage: the one clip that PPO, dual-clip, DAPO, GSPO and TBPO share.

    r_hat = clip(r, low(A), high(A)),  low, high = pos_* where A > 0, neg_* where A < 0

The gradient is that of r inside the band and exactly zero outside. min(r A, clip(r, 1-e, 1+e) A) is this clip with
the band [0, 1+e] for A > 0 and [1-e, inf) for A < 0; dual-clip closes the second at c; TBPO closes it at 1 + delta_h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from .base import ObjectiveError, Surrogate, Units
from .hyper import Param

# Hyperparameters that several objectives have.
ClipLow = Annotated[float, Param("token ratio: width below 1", at_least=0, below=1)]
ClipHigh = Annotated[float, Param("token ratio: width above 1", at_least=0)]
SeqClipLow = Annotated[float, Param("response ratio: width below 1", at_least=0, below=1)]
SeqClipHigh = Annotated[float, Param("response ratio: width above 1", at_least=0)]
BandScale = Annotated[float, Param("multiplies all sequence bands", above=0)]


@dataclass(frozen=True)
class Band:
    """The interval of r in which the surrogate has a gradient, by sign of A. A = 0 has no band."""

    pos_high: float
    neg_low: float
    neg_high: float = math.inf
    pos_low: float = 0.0

    def limits(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(low, high) of each unit; (0, inf) where A = 0."""
        positive, negative = advantages > 0, advantages < 0
        # torch.where() of two numbers would take the default dtype, and in BF16 a band of 3e-4 is gone.
        zero, inf = torch.zeros_like(advantages), torch.full_like(advantages, math.inf)
        low = torch.where(positive, self.pos_low, torch.where(negative, self.neg_low, zero))
        high = torch.where(positive, self.pos_high, torch.where(negative, self.neg_high, inf))
        return low, high


def clipped_surrogate(
    units: Units, band: Band, *, neg_report_high: float | None = None, whole_response: bool = False
) -> Surrogate:
    """clip(r, band of A's sign) * A.

    ``whole_response``: the ratio is the response's, so that one outside the band is out altogether.
    ``neg_report_high``: where the report's band for A < 0 ends, when the surrogate itself has no upper end there
    (PPO, GSPO): above it they still push, and the share of such units is what TBPO is about.
    """
    ratio, advantages = units.ratio, units.advantages
    low, high = band.limits(advantages)
    r = ratio.detach()
    above, below = r > high, r < low
    outside = above | below if whole_response else None
    if neg_report_high is not None:
        above = above | ((advantages < 0) & (r > neg_report_high))
    return Surrogate(ratio.clamp(low, high) * advantages, above, below, outside)


def scaled(name: str, width: float, band_scale: float) -> float:
    """The lower end 1 - width * band_scale, which must stay a ratio."""
    if width * band_scale >= 1:
        raise ObjectiveError(
            f"{name}={width:g} times band_scale={band_scale:g} is {width * band_scale:g}, a band that starts at a ratio"
            f" of 0 or below; choose a band_scale below {1 / width:g}"
        )
    return 1 - width * band_scale
