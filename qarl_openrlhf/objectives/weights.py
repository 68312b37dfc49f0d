"""Mismatch weights w: the correction for tokens that were sampled by another policy than the one that learns.

delta_t = logpi_old,learner - logpi_sampler; none of them carries a gradient. C is ``is_cap``.

    none    1
    token   min(e^delta_t, C)                                  truncated importance sampling (TIS), Yao et al. 2025
    seq     exp(clamp(mean delta, -log C, +log C))             QaRL (arXiv 2604.07853)
    mis     min(exp(mean delta), C) where low <= statistic <= high, else 0     masked (MIS), Liu et al. 2025

``seq`` clamps the *log*: the paper prints clip(w, [-log C, log C]), which read literally turns w = 1 into 0.69.
The statistic of ``mis`` is a ratio of the response: ``geometric`` exp(mean delta), ``product`` exp(sum delta), or
``worst_token``: every e^delta_t must lie in [low, high].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Batch

WEIGHTS = ("none", "token", "seq", "mis")
STATISTICS = ("geometric", "product", "worst_token")


@dataclass(frozen=True)
class MismatchWeight:
    """``values`` float32 and ``clipped`` bool, [B, T] for ``token`` and [B] for the others; ``rejected`` bool [B]."""

    values: Tensor
    clipped: Tensor
    rejected: Tensor | None = None

    def clip(self, low: Tensor, high: Tensor) -> MismatchWeight:
        """The same within [low, high]; what was rejected keeps its weight of 0."""
        values = self.values.clamp(low, high)
        if self.rejected is not None:
            values = torch.where(self.rejected, 0.0, values)
        return replace(self, values=values, clipped=self.clipped | (values != self.values))


def mismatch_weight(
    batch: Batch, kind: str, cap: float, *, statistic: str = "geometric", low: float = 0.0, high: float = 2.0
) -> MismatchWeight:
    """The weight ``kind`` (one of WEIGHTS) of a batch. ``statistic``, ``low`` and ``high`` are those of ``mis``."""
    log_cap = math.log(cap)
    if kind == "token":
        return MismatchWeight(batch.mismatch.exp().clamp(max=cap), batch.mask & (batch.mismatch > log_cap))
    mean = batch.response_mean(batch.mismatch)
    if kind == "none":
        return MismatchWeight(torch.ones_like(mean), torch.zeros_like(batch.nonempty))
    if kind == "seq":
        return MismatchWeight(mean.clamp(-log_cap, log_cap).exp(), mean.abs() > log_cap)
    # Compared as logarithms: exp(sum delta) over 16,384 tokens does not fit float32.
    if statistic == "worst_token":
        log_low = torch.where(batch.mask, batch.mismatch, math.inf).amin(-1)
        log_high = torch.where(batch.mask, batch.mismatch, -math.inf).amax(-1)
    else:
        log_low = log_high = mean if statistic == "geometric" else batch.mismatch.sum(-1)
    lower = math.log(low) if low > 0 else -math.inf
    rejected = batch.nonempty & ((log_low < lower) | (log_high > math.log(high)))
    weight = torch.where(rejected, 0.0, mean.exp().clamp(max=cap))
    return MismatchWeight(weight, rejected | (mean > log_cap), rejected)
