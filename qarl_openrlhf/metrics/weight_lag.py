"""How old the weights were that sampled the tokens which are trained on."""

import torch

LAGS = (0, 1, 2, 3, 4)  # the last one counts everything above, too


def statistics(weight_versions: torch.Tensor, action_mask: torch.Tensor, version: int) -> dict:
    """Sums for one micro-batch.

    Args:
        weight_versions: int64 [B, A], the version each token was sampled under, -1 where unknown (not counted, except below).
        action_mask: [B, A].
        version: of the weights that are trained, i.e. the last published one.

    Metrics: ``async/version_lag_mean`` and ``_max`` (versions between sampling and training), ``tokens_stale_fraction`` (lag
    above 0), ``tokens_by_lag/<n>`` (fractions), ``responses_mixed_fraction`` (sampled under more than one version) and
    ``tokens_unknown_fraction`` (an agent changed what was sampled).
    """
    mask = action_mask.bool()
    if not mask.numel():
        return {}
    known = mask & (weight_versions >= 0)
    count, lag = known.sum(), version - weight_versions
    ratios = {
        "async/tokens_unknown_fraction": (mask.sum() - count, mask.sum()),
        "async/version_lag_mean": (torch.where(known, lag, 0).sum(), count),
        "async/tokens_stale_fraction": ((known & (lag > 0)).sum(), count),
    }
    for n in LAGS:
        here = lag >= n if n == LAGS[-1] else lag == n
        ratios[f"async/tokens_by_lag/{n}"] = ((known & here).sum(), count)
    rows = known.any(-1)
    newest = torch.where(known, weight_versions, -1).amax(-1)
    oldest = torch.where(known, weight_versions, torch.iinfo(torch.int64).max).amin(-1)
    ratios["async/responses_mixed_fraction"] = (((newest != oldest) & rows).sum(), rows.sum())
    largest = torch.where(known, lag, torch.iinfo(torch.int64).min).max()
    return {"ratios": ratios, "maxima": {"async/version_lag_max": torch.where(count > 0, largest.double(), torch.nan)}}
