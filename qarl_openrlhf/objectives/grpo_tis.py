"""GRPO (DeepSeekMath, arXiv 2402.03300) with truncated importance sampling (TIS, Yao et al. 2025)."""

from __future__ import annotations

from .band import Band, ClipHigh, ClipLow, clipped_surrogate
from .base import Surrogate, Units
from .objective import objective


@objective(level="token", mean="tokens", is_weight="token")
def grpo_tis(units: Units, *, clip_ratio_low: ClipLow = 0.2, clip_ratio_high: ClipHigh = 0.2) -> Surrogate:
    """PPO's clip by token (arXiv 1707.06347, eq. 7), r_t = exp(Delta_t):

        J = mean over tokens of  w_t min(r_t A, clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

    For A < 0 and r_t above the clip the gradient goes on, without a bound: ``neg_high_frac`` counts those tokens.
    ``clip_ratio_low``, ``clip_ratio_high``: 0.2, 0.2. Default weight ``token``.
    """
    band = Band(pos_high=1 + clip_ratio_high, neg_low=1 - clip_ratio_low)
    return clipped_surrogate(units, band, neg_report_high=1 + clip_ratio_high)
