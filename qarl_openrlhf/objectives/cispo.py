"""CISPO: MiniMax-M1, arXiv 2506.13585, equations 4 and 5 (no lower clip, as there)."""

from __future__ import annotations

from .band import ClipHigh
from .base import Surrogate, Units
from .objective import objective


@objective(level="token", mean="tokens", is_weight="token")
def cispo(units: Units, *, clip_ratio_high: ClipHigh = 0.28) -> Surrogate:
    """The ratio is a capped weight of the policy gradient, so no token ever loses its gradient:

        J = mean over tokens of  w_t sg[min(r_t, 1 + clip_ratio_high)] A logpi_t

    The report counts a capped token as above its band, for either sign of A. ``clip_ratio_high``: 0.28. Default
    weight ``token``.
    """
    high = 1 + clip_ratio_high
    ratio = units.ratio.detach()
    above = (ratio > high) & (units.advantages != 0)
    return Surrogate(ratio.clamp(max=high) * units.advantages * units.log_probs, above=above)
