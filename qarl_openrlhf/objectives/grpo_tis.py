"""GRPO with truncated importance sampling: DeepSeekMath, arXiv 2402.03300; TIS: Yao et al. 2025, the QaRL paper's baseline."""

from __future__ import annotations

from typing import Annotated

from .band import Band, clipped_surrogate
from .base import Surrogate, Units
from .hyper import Param
from .objective import objective


@objective(level="token", mean="tokens", is_weight="token")
def grpo_tis(
    units: Units,
    *,
    clip_ratio_low: Annotated[float, Param("eps below 1", at_least=0, below=1)] = 0.2,
    clip_ratio_high: Annotated[float, Param("eps above 1", at_least=0)] = 0.2,
) -> Surrogate:
    """PPO's clip by token, r_t = exp(Delta_t):

    J = mean over tokens of  w_t min(r_t A, clip(r_t, 1 - eps_low, 1 + eps_high) A)

    For A < 0 and r_t > 1 + eps_high the gradient goes on, without a bound. Default weight ``token``.
    """
    band = Band(pos_high=1 + clip_ratio_high, neg_low=1 - clip_ratio_low)
    return clipped_surrogate(units, band, neg_report_high=1 + clip_ratio_high)
