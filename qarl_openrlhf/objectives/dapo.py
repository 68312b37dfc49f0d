"""DAPO's clip-higher: Yu et al. 2025, arXiv 2503.14476, equation 10 (DAPO's sampling and rewards are no loss)."""

from __future__ import annotations

from .band import ClipHigh, ClipLow
from .base import Surrogate, Units
from .grpo_tis import grpo_tis
from .objective import objective


@objective(level="token", mean="tokens", is_weight="token")
def dapo(units: Units, *, clip_ratio_low: ClipLow = 0.2, clip_ratio_high: ClipHigh = 0.28) -> Surrogate:
    """``grpo_tis`` with a higher upper clip, which leaves room to tokens of low probability.

    ``clip_ratio_low``, ``clip_ratio_high``: 0.2, 0.28. Default weight ``token``.
    """
    return grpo_tis(units, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
