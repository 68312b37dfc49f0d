"""Metrics as sums, so that micro-batches and ranks are added first and divided once.

    total = add_sums([result.sums for every micro-batch]);  all-reduce total (SUM);  metrics = metrics_from_sums(total)

``sums`` maps a metric's name to (numerator, denominator), 0-d float32. The effective sample size is not one quotient:
(sum w)^2 / (n sum w^2) comes from ``is/mean`` and ``is/mean_sq``, after the adding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Batch, Surrogate, Units
from .weights import MismatchWeight

Sums = dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def batch_sums(batch: Batch, units: Units, surrogate: Surrogate, weight: MismatchWeight) -> Sums:
    """The sums of one micro-batch. A unit is a token or a response, as the objective (or the weight, for is/*) has it.

    objective/in_band_frac + pos_clip_frac + neg_low_frac + neg_high_frac = 1, all over every unit: the ratio is inside
    the band of its advantage's sign; above it (A > 0); below it, above it (A < 0). A = 0 has no band, counts as inside.
    objective/in_band_frac_pos, _neg: the same among the units with A > 0, with A < 0.
    objective/ratio_mean: mean r. objective/ppo_kl: mean -Delta over tokens (OpenRLHF's).
    is/mean, is/clip_frac (capped, clamped or rejected), is/reject_frac, is/ess (a fraction of the units, 1 is best).
    """
    valid = batch.mask if units.log_ratio.ndim == 2 else batch.nonempty
    none = torch.zeros_like(valid)
    above = none if surrogate.above is None else surrogate.above & valid
    below = none if surrogate.below is None else surrogate.below & valid
    positive, negative = (units.advantages > 0) & valid, (units.advantages < 0) & valid
    inside = valid & ~above & ~below

    w_valid = batch.mask if weight.values.ndim == 2 else batch.nonempty
    w = torch.where(w_valid, weight.values, 0.0)
    rejected = torch.zeros_like(batch.nonempty) if weight.rejected is None else weight.rejected

    def total(x: Tensor) -> Tensor:
        return x.sum(dtype=torch.float32)

    n, n_positive, n_negative, n_w = total(valid), total(positive), total(negative), total(w_valid)
    n_tokens, n_responses = total(batch.lengths), total(batch.nonempty)
    return {
        "objective/in_band_frac": (total(inside), n),
        "objective/in_band_frac_pos": (total(inside & positive), n_positive),
        "objective/in_band_frac_neg": (total(inside & negative), n_negative),
        "objective/pos_clip_frac": (total((above | below) & positive), n),
        "objective/neg_low_frac": (total(below & negative), n),
        "objective/neg_high_frac": (total(above & negative), n),
        "objective/ratio_mean": (total(torch.where(valid, units.ratio, 0.0)), n),
        "objective/ppo_kl": (-total(batch.log_ratio), n_tokens),
        "is/mean": (total(w), n_w),
        "is/mean_sq": (total(w * w), n_w),
        "is/clip_frac": (total(weight.clipped), n_w),
        "is/reject_frac": (total(rejected), n_responses),
    }


def add_sums(parts: list[Sums]) -> Sums:
    """Numerators and denominators added, name by name."""
    return {
        name: (sum(part[name][0] for part in parts), sum(part[name][1] for part in parts)) for name in parts[0]
    }


def metrics_from_sums(sums: Sums) -> dict[str, Tensor]:
    """Each numerator over its denominator (0 where nothing was counted), and ``is/ess``. No GPU is waited for."""

    def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
        return numerator / torch.where(denominator > 0, denominator, 1.0)

    metrics = {name: quotient(*pair) for name, pair in sums.items()}
    if "is/mean_sq" in metrics:
        metrics["is/ess"] = quotient(metrics["is/mean"] ** 2, metrics["is/mean_sq"])
    return metrics


def band_warning(sums: Sums, *, least: float = 0.5) -> str | None:
    """One line when under ``least`` of the units with A > 0, or with A < 0, lie in their band; else None."""
    for sign, side in (("pos", "A > 0"), ("neg", "A < 0")):
        inside, count = (float(x) for x in sums[f"objective/in_band_frac_{sign}"])
        if count == 0 or inside >= least * count:
            continue
        high, low = (float(sums[f"objective/{name}"][0]) for name in ("neg_high_frac", "neg_low_frac"))
        where = "above" if sign == "pos" else f"{high:.0f} above, {low:.0f} below"
        return (
            f"only {inside / count:.0%} of the {count:.0f} units with {side} are in the trust band ({where}):"
            " raise --objective.band_scale (about sqrt(16384 / mean response length)), lower the learning rate,"
            " or make fewer updates a rollout"
        )
    return None
