"""The paper's arms and the settings around them, as flags: what ``--preset NAME`` stands for.

``PRESETS[name]`` maps a flag (without the dashes) to its value. ``BY_LENGTH`` as a value waits for the run's mean
response length; ``preset_flags`` fills it in.
"""

from __future__ import annotations

import math

from .base import ObjectiveError
from .registry import list_objectives

PAPER_RESPONSE_LENGTH = 16384  # tokens; what the paper's bands belong to
BY_LENGTH = "sqrt(16384 / mean response length)"

PRESETS: dict[str, dict[str, object]] = {
    # An arm is its objective with the defaults of the paper. onpolicy_grpo comes with Objective.on_policy, by which
    # flags that make more than one optimizer step a rollout are refused.
    **{name: {"objective.name": name} for name in list_objectives()},
    # Sequence bands for responses far shorter than the paper's.
    **{
        f"{name}_short": {"objective.name": name, "objective.band_scale": BY_LENGTH}
        for name in ("tbpo", "gspo", "mis_gspo")
    },
    # Masked importance sampling with the narrow band that very long responses need (and only they can bear).
    **{
        f"{name}_long": {"objective.name": name, "objective.is_low": 0.999, "objective.is_high": 1.001}
        for name in ("mis_gspo", "mis_grpo")
    },
}


def short_response_band_scale(mean_length: float) -> float:
    """``band_scale`` for a mean length in tokens: the spread of a mean over L tokens goes like 1/sqrt(L)."""
    if not 0 < mean_length < math.inf:
        raise ObjectiveError(f"mean response length must be a finite number above 0 tokens, got {mean_length!r}")
    return math.sqrt(PAPER_RESPONSE_LENGTH / mean_length)


def preset_flags(name: str, mean_response_length: float | None = None) -> dict[str, object]:
    """The flags of a preset, band scale filled in. Only ``*_short`` need ``mean_response_length`` (tokens)."""
    if name not in PRESETS:
        raise ObjectiveError(f"unknown preset {name!r}; there are: {', '.join(PRESETS)}")
    flags = dict(PRESETS[name])
    for flag, value in flags.items():
        if value == BY_LENGTH:
            if mean_response_length is None:
                raise ObjectiveError(f"preset {name!r} sets {flag} to {BY_LENGTH}: give the mean length in tokens")
            flags[flag] = short_response_band_scale(mean_response_length)
    return flags
