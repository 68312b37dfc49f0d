"""Policy objectives for rollouts that were sampled by another (low-bit) policy. torch only.

    build_objective("tbpo", band_scale=4.0)(log_probs, old_log_probs, rollout_log_probs, advantages, action_mask).loss
"""

from .base import ObjectiveError, Surrogate, Units
from .hyper import Param
from .metrics import add_sums, band_warning, metrics_from_sums
from .objective import Objective, ObjectiveResult, objective
from .presets import PRESETS, preset_flags, short_response_band_scale
from .registry import build_objective, find_spec, list_objectives, objective_hyperparameters
from .tokens import REGIONS, TokenStates

__all__ = [
    "PRESETS",
    "Objective",
    "ObjectiveError",
    "ObjectiveResult",
    "Param",
    "REGIONS",
    "Surrogate",
    "TokenStates",
    "Units",
    "add_sums",
    "band_warning",
    "build_objective",
    "find_spec",
    "list_objectives",
    "metrics_from_sums",
    "objective",
    "objective_hyperparameters",
    "preset_flags",
    "short_response_band_scale",
]
