"""GRPO on positive samples only, an arm of the QaRL paper (arXiv 2604.07853, figure 8)."""

from __future__ import annotations

from dataclasses import replace

import torch

from .band import Band, ClipHigh, clipped_surrogate
from .base import Surrogate, Units
from .objective import objective


@objective(level="token", mean="tokens", is_weight="token", drops_by_ratio=False)
def positive_grpo(units: Units, *, clip_ratio_high: ClipHigh = 0.2) -> Surrogate:
    """GRPO with TIS where A > 0, nothing elsewhere:

        J = mean over tokens of  [A > 0] w_t min(r_t, 1 + clip_ratio_high) A

    Samples with A <= 0 stay in the denominator, unless ``drop``. ``clip_ratio_high``: 0.2. Default weight ``token``.
    """
    surrogate = clipped_surrogate(units, Band(pos_high=1 + clip_ratio_high, neg_low=0.0))
    positive = units.advantages > 0
    return replace(surrogate, values=torch.where(positive, surrogate.values, 0.0), outside=~positive)
