"""Strictly on-policy GRPO, an arm of the QaRL paper (arXiv 2604.07853, figure 8)."""

from __future__ import annotations

from .band import ClipHigh, ClipLow
from .base import Surrogate, Units
from .grpo_tis import grpo_tis
from .objective import objective


@objective(level="token", mean="tokens", is_weight="token", on_policy=True)
def onpolicy_grpo(units: Units, *, clip_ratio_low: ClipLow = 0.2, clip_ratio_high: ClipHigh = 0.2) -> Surrogate:
    """``grpo_tis`` with one optimizer step a rollout, so that r = 1 and nothing is ever clipped.

    The step count is the trainer's: it reads ``Objective.on_policy`` and refuses a configuration with more than one.
    ``clip_ratio_low``, ``clip_ratio_high``: 0.2, 0.2. Default weight ``token``.
    """
    return grpo_tis(units, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
