"""GSPO with masked importance sampling (MIS): Liu et al. 2025, "When Speed Kills Stability"."""

from __future__ import annotations

from .band import BandScale, SeqClipHigh, SeqClipLow
from .base import Surrogate, Units
from .gspo import gspo
from .objective import objective


@objective(level="response", mean="responses", is_weight="mis")
def mis_gspo(
    units: Units,
    *,
    seq_clip_ratio_low: SeqClipLow = 3e-4,
    seq_clip_ratio_high: SeqClipHigh = 4e-4,
    band_scale: BandScale = 1.0,
) -> Surrogate:
    """``gspo`` with the weight ``mis``: a response whose mismatch statistic leaves [is_low, is_high] has weight 0.

    ``seq_clip_ratio_low``, ``seq_clip_ratio_high``: 3e-4, 4e-4, times ``band_scale`` (1), which widens a given
    [is_low, is_high] of the geometric statistic as well.
    """
    return gspo(
        units, seq_clip_ratio_low=seq_clip_ratio_low, seq_clip_ratio_high=seq_clip_ratio_high, band_scale=band_scale
    )
