"""GSPO, Group Sequence Policy Optimization: Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7."""

from __future__ import annotations

from .band import Band, BandScale, SeqClipHigh, SeqClipLow, clipped_surrogate, scaled
from .base import Surrogate, Units
from .objective import objective


@objective(level="response", mean="responses", is_weight="seq")
def gspo(
    units: Units,
    *,
    seq_clip_ratio_low: SeqClipLow = 3e-4,
    seq_clip_ratio_high: SeqClipHigh = 4e-4,
    band_scale: BandScale = 1.0,
) -> Surrogate:
    """PPO's clip on the ratio of the whole response, s = exp(mean Delta):

        J = mean over responses of  w min(s A, clip(s, 1 - seq_clip_ratio_low, 1 + seq_clip_ratio_high) A)

    For A < 0 and s above the clip the gradient goes on: ``neg_high_frac`` counts those responses, TBPO stops them.
    ``seq_clip_ratio_low``, ``seq_clip_ratio_high``: 3e-4, 4e-4, times ``band_scale`` (1). Default weight ``seq``.
    """
    high = 1 + seq_clip_ratio_high * band_scale
    band = Band(pos_high=high, neg_low=scaled("seq_clip_ratio_low", seq_clip_ratio_low, band_scale))
    return clipped_surrogate(units, band, neg_report_high=high, whole_response=True)
