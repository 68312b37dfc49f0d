"""SAPO, Soft Adaptive Policy Optimization: Gao et al. 2025, arXiv 2511.20347, equations 5 and 6."""

from __future__ import annotations

from typing import Annotated

import torch

from .base import Surrogate, Units
from .hyper import Param
from .objective import objective


@objective(level="token", mean="responses", is_weight="token")
def sapo(
    units: Units,
    *,
    tau_pos: Annotated[float, Param("temperature of the gate where A > 0", above=0)] = 1.0,
    tau_neg: Annotated[float, Param("temperature of the gate elsewhere", above=0)] = 1.05,
) -> Surrogate:
    """A sigmoid gate on the token ratio in place of a clip:

        J = mean over responses of the mean over tokens of  w_t (4 / tau) sigmoid(tau (r_t - 1)) A

    The gradient of the gate is 4 s (1 - s) <= 1, with s the sigmoid: 1 at r = 1, and it falls off on both sides without
    an edge. So there is no band to report. ``tau_pos`` (A > 0), ``tau_neg``: 1.0, 1.05. Default weight ``token``.
    """
    tau = torch.where(units.advantages > 0, tau_pos, torch.full_like(units.advantages, tau_neg))
    return Surrogate(4 / tau * torch.sigmoid(tau * (units.ratio - 1)) * units.advantages)
