"""How far the sampler and the learner are apart on the tokens that were sampled.

delta_t = log pi_old,learner - log pi_old,sampler, both for the sampled token at the same temperature. The one rate for "the
two policies differ" is the mean of |delta_t|.
"""

import torch

from qarl_openrlhf.objectives.base import LOG_RATIO_LIMIT


def statistics(learner: torch.Tensor, sampler: torch.Tensor, action_mask: torch.Tensor) -> dict:
    """Sums for one micro-batch.

    Args:
        learner, sampler: float32 [B, A] log-probs; action_mask: [B, A]. Values outside the mask are ignored.

    A sampler log-prob of -inf counts as a difference of +20. Metrics: ``mismatch/kl`` (k1 estimate of
    KL(sampler || learner)), ``k3``, ``abs_logp_mean``, ``abs_logp_max``, ``ratio_p01/p99`` (token ratios e^delta),
    ``seq_ratio_min/max`` (e^mean delta), ``abs_logp_by_position/<n>`` for tokens up to position n of the response (powers of two,
    the bucket above the previous n), and ``policy/entropy_sampled`` (mean of -log pi_sampler, an unbiased entropy estimate).
    """
    mask = action_mask.bool()
    if not mask.numel():
        return {}
    delta = torch.where(mask, learner.float() - sampler.float(), 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    magnitude, tokens, lengths = delta.abs(), mask.sum(), mask.sum(-1)
    # NaN for a response without tokens; `Sums` leaves out an extreme that is NaN.
    sequence_log_ratio = delta.sum(-1).double() / lengths
    ratios = {
        "mismatch/kl": (-delta.sum(), tokens),
        "mismatch/k3": (torch.where(mask, delta.exp() - 1 - delta, 0.0).sum(), tokens),
        "mismatch/abs_logp_mean": (magnitude.sum(), tokens),
        "policy/entropy_sampled": (-torch.where(mask, sampler.float().clamp(min=-100), 0.0).sum(), tokens),
    }
    position = mask.long().cumsum(-1)
    below, upper = 0, 1
    while below < mask.shape[1]:
        here = mask & (position > below) & (position <= upper)
        ratios[f"mismatch/abs_logp_by_position/{upper}"] = (torch.where(here, magnitude, 0.0).sum(), here.sum())
        below, upper = upper, 2 * upper
    return {
        "ratios": ratios,
        "maxima": {
            "mismatch/abs_logp_max": torch.where(tokens > 0, magnitude.max(), torch.nan),
            "mismatch/seq_ratio_max": _extreme(sequence_log_ratio, lengths, torch.max).exp(),
        },
        "minima": {"mismatch/seq_ratio_min": _extreme(sequence_log_ratio, lengths, torch.min).exp()},
        "samples": {
            "token_ratio": (torch.where(mask, delta.exp(), torch.nan), {"mismatch/ratio_p01": 0.01, "mismatch/ratio_p99": 0.99}),
        },
    }


def _extreme(values: torch.Tensor, lengths: torch.Tensor, which) -> torch.Tensor:
    """The largest or smallest of [B] values where lengths > 0; NaN if there are none."""
    rows = lengths > 0
    aside = -torch.inf if which is torch.max else torch.inf
    return torch.where(rows.any(), which(torch.where(rows, values, aside)), torch.nan)
