"""Error tokens: what a low-bit sampler produces and a full-precision one would not.

Two cheap signs, by sign of the response's advantage: tokens that the sampler itself found very unlikely, and tokens inside a
repetition (the last ``REPEAT_NGRAM`` tokens occurred before in the same response).
"""

import torch

LOW_PROBABILITY = 1e-3
REPEAT_NGRAM = 4
HASH_MULTIPLIER = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX generator


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
    """Bool [B, A]: the action token ends an n-gram of action tokens that the same row has shown before.

    n-grams are compared by a 64-bit hash: a Python loop over a rollout's tokens would take longer than all other metrics.
    """
    mask = mask.bool()
    windows = mask.shape[1] - n + 1
    if windows < 1:
        return torch.zeros_like(mask)
    # A row's action tokens to the left, in their order: a turn of the environment between them does not count.
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    ids = tokens.gather(1, order).long()
    key = torch.zeros_like(ids[:, :windows])
    for k in range(n):
        key = (key + ids[:, k : k + windows]) * HASH_MULTIPLIER  # wraps around
    ends = torch.arange(n - 1, mask.shape[1], device=mask.device)
    valid = ends < mask.sum(1, keepdim=True)
    # Equal keys lie side by side, the first to occur first; windows that reach beyond the row's tokens come after all others.
    key, where = key.sort(dim=1, stable=True)
    again = torch.zeros_like(valid)
    again[:, 1:] = key[:, 1:] == key[:, :-1]
    shown = torch.zeros_like(mask)
    shown[:, n - 1 :] = torch.zeros_like(valid).scatter(1, where, again) & valid
    return torch.zeros_like(mask).scatter(1, order, shown)
