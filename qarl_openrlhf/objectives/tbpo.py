"""TBPO, Trust-Band Policy Optimization: QaRL, arXiv 2604.07853."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from .band import Band, BandScale, clipped_surrogate, scaled
from .base import Surrogate, Units
from .hyper import Param
from .objective import objective


@objective(level="response", mean="responses", is_weight="seq")
def tbpo(
    units: Units,
    *,
    seq_clip_ratio_high: Annotated[float, Param("eps_h, upper side for A > 0", at_least=0)] = 4e-4,
    seq_clip_ratio_low: Annotated[float, Param("GSPO's lower side, unused by TBPO", at_least=0, below=1)] = 3e-4,
    neg_seq_clip_ratio_high: Annotated[float, Param("delta_h, upper side for A < 0", at_least=0)] = 7e-4,
    neg_seq_clip_ratio_low: Annotated[float, Param("delta_l, lower side for A < 0", at_least=0, below=1)] = 3e-4,
    band_scale: BandScale = 1.0,
    weight_band: Annotated[bool, Param("clip the mismatch weight to the same bands")] = False,
) -> Surrogate:
    """Two-sided band on negative samples, on the ratio of the whole response, r = exp(mean Delta).

        J = mean over responses of  w r_hat A
        r_hat = clip(r, 0, 1 + eps_h)               where A > 0
                clip(r, 1 - delta_l, 1 + delta_h)   where A < 0

    There is no min(): outside the band the gradient is zero, for A < 0 also above it, where PPO and GSPO push on and a
    few garbled tokens of a low-bit rollout would drive the update.

    eps_h is ``seq_clip_ratio_high`` 4e-4, delta_l ``neg_seq_clip_ratio_low`` 3e-4, delta_h ``neg_seq_clip_ratio_high``
    7e-4, all for 16,384-token responses: the spread of a mean over L tokens goes like 1/sqrt(L), so ``band_scale`` (1)
    multiplies the three. ``seq_clip_ratio_low`` is taken, so that the paper's configuration loads, and not used.
    ``weight_band`` (off) also clips w to the band of the response. Default weight ``seq``.
    """
    band = Band(
        pos_high=1 + seq_clip_ratio_high * band_scale,
        neg_low=scaled("neg_seq_clip_ratio_low", neg_seq_clip_ratio_low, band_scale),
        neg_high=1 + neg_seq_clip_ratio_high * band_scale,
    )
    surrogate = clipped_surrogate(units, band, whole_response=True)
    return replace(surrogate, weight_band=band.limits(units.advantages)) if weight_band else surrogate
