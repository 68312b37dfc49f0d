"""Dual-clip PPO: Ye et al. 2019, arXiv 1912.09729, equation 5."""

from __future__ import annotations

from typing import Annotated

from .band import Band, ClipHigh, ClipLow, clipped_surrogate
from .base import ObjectiveError, Surrogate, Units
from .hyper import Param
from .objective import objective


@objective(level="token", mean="tokens", is_weight="token")
def dual_clip(
    units: Units,
    *,
    clip_ratio_low: ClipLow = 0.2,
    clip_ratio_high: ClipHigh = 0.2,
    clip_ratio_c: Annotated[float, Param("A < 0: no gradient above this ratio", above=1)] = 3.0,
) -> Surrogate:
    """PPO's clip with a floor under negative samples:

        P = min(r_t A, clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A)
        J = mean over tokens of  w_t max(P, clip_ratio_c A)  where A < 0,  w_t P  elsewhere

    so for A < 0 the gradient is that of r_t on [1 - clip_ratio_low, clip_ratio_c] and zero outside.
    ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c``: 0.2, 0.2, 3. Default weight ``token``.
    """
    if clip_ratio_c < 1 + clip_ratio_high:
        raise ObjectiveError(
            f"dual_clip: clip_ratio_c={clip_ratio_c:g} must be at least 1 + clip_ratio_high = {1 + clip_ratio_high:g}"
        )
    band = Band(pos_high=1 + clip_ratio_high, neg_low=1 - clip_ratio_low, neg_high=clip_ratio_c)
    return clipped_surrogate(units, band)
