"""How far the sampler and the learner are apart on the tokens that were sampled.

delta_t = log pi_old,learner - log pi_old,sampler, both for the sampled token at the same temperature. The one rate for "the
two policies differ" is the mean of |delta_t|.
"""

import torch

POSITION_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LOG_RATIO_LIMIT = 20.0


def statistics(learner: torch.Tensor, sampler: torch.Tensor, action_mask: torch.Tensor) -> dict:
    """Sums for one micro-batch.

    Args:
        learner, sampler: float32 [B, A] log-probs; action_mask: [B, A]. Values outside the mask are ignored.

    A sampler log-prob of -inf counts as a difference of +20. Metrics: ``mismatch/kl`` (k1 estimate of
    KL(sampler || learner)), ``k3``, ``abs_logp_mean``, ``abs_logp_max``, ``ratio_p01/p99`` (token ratios e^delta),
    ``seq_ratio_min/max`` (e^mean delta), ``abs_logp_by_position/<n>`` for tokens up to position n of the response (the bucket
    above the previous n), and ``policy/entropy_sampled`` (mean of -log pi_sampler, an unbiased entropy estimate).
    """
    mask = action_mask.bool()
    delta = torch.where(mask, learner.float() - sampler.float(), 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tokens = mask.sum()
    if tokens == 0:
        return {}
    magnitude = delta.abs()
    lengths = mask.sum(-1)
    rows = lengths > 0
    sequence_log_ratio = (delta.sum(-1)[rows] / lengths[rows]).double()
    ratios = {
        "mismatch/kl": (-delta.sum(), tokens),
        "mismatch/k3": (torch.where(mask, delta.exp() - 1 - delta, 0.0).sum(), tokens),
        "mismatch/abs_logp_mean": (magnitude.sum(), tokens),
        "policy/entropy_sampled": (-torch.where(mask, sampler.float().clamp(min=-100), 0.0).sum(), tokens),
    }
    position = mask.long().cumsum(-1)
    below = 0
    for upper in POSITION_BUCKETS:
        here = mask & (position > below) & (position <= upper)
        if here.any():
            ratios[f"mismatch/abs_logp_by_position/{upper}"] = (magnitude[here].sum(), here.sum())
        below = upper
    return {
        "ratios": ratios,
        "maxima": {
            "mismatch/abs_logp_max": float(magnitude.max()),
            "mismatch/seq_ratio_max": float(sequence_log_ratio.max().exp()),
        },
        "minima": {"mismatch/seq_ratio_min": float(sequence_log_ratio.min().exp())},
        "samples": {"token_ratio": (delta[mask].exp(), {"mismatch/ratio_p01": 0.01, "mismatch/ratio_p99": 0.99})},
    }
