"""GRPO with masked importance sampling (MIS): Liu et al. 2025, "When Speed Kills Stability"."""

from __future__ import annotations

from .band import BandScale, ClipHigh, ClipLow
from .base import Surrogate, Units
from .grpo_tis import grpo_tis
from .objective import objective


@objective(level="token", mean="tokens", is_weight="mis")
def mis_grpo(
    units: Units, *, clip_ratio_low: ClipLow = 0.2, clip_ratio_high: ClipHigh = 0.2, band_scale: BandScale = 1.0
) -> Surrogate:
    """``grpo_tis`` with the weight ``mis``: a response whose mismatch statistic leaves [is_low, is_high] has weight 0.

    ``clip_ratio_low``, ``clip_ratio_high``: 0.2, 0.2. ``band_scale`` (1) is for the weight: it widens a given
    [is_low, is_high] of the geometric statistic, and leaves the clip of the tokens alone.
    """
    return grpo_tis(units, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
