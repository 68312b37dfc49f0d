"""Error tokens: what a low-bit sampler produces and a full-precision one would not.

Two cheap signs, by sign of the response's advantage: tokens that the sampler itself found very unlikely, and tokens inside a
repetition (the last ``REPEAT_NGRAM`` tokens occurred before in the same response).
"""

import torch

LOW_PROBABILITY = 1e-3
REPEAT_NGRAM = 4


def statistics(batch) -> dict:
    """Sums for one micro-batch of ``Experience`` (sequences [B, S], action_mask, rollout_log_probs, advantages [B, S-1])."""
    mask = batch.action_mask.bool()
    unlikely = mask & (batch.rollout_log_probs.float() < torch.tensor(LOW_PROBABILITY).log())
    repeated = repeats(batch.sequences[:, 1:], mask)
    sums = {"error_token/low_prob_rate": (unlikely.sum(), mask.sum()), "error_token/repeat_rate": (repeated.sum(), mask.sum())}
    if batch.advantages is not None:
        for sign, chosen in (("pos", batch.advantages > 0), ("neg", batch.advantages < 0)):
            here = mask & chosen
            sums[f"error_token/low_prob_rate_{sign}"] = ((unlikely & here).sum(), here.sum())
            sums[f"error_token/repeat_rate_{sign}"] = ((repeated & here).sum(), here.sum())
    return {"ratios": sums}


def repeats(tokens: torch.Tensor, mask: torch.Tensor, n: int = REPEAT_NGRAM) -> torch.Tensor:
    """Bool [B, A]: the action token ends an n-gram of action tokens that the same row has shown before."""
    marked = torch.zeros_like(mask)
    for row, (ids, active) in enumerate(zip(tokens.tolist(), mask.tolist())):
        seen, window = set(), []
        for column, (token, on) in enumerate(zip(ids, active)):
            if not on:
                continue
            window = (window + [token])[-n:]
            if len(window) == n:
                gram = tuple(window)
                marked[row, column] = gram in seen
                seen.add(gram)
    return marked
