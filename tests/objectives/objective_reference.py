"""The objectives a second time, from the papers' formulas: float64, a loop over responses. And the batches for them."""

import math

import torch


def weight_of(kind, d, cap=2.0, statistic="geometric", low=0.0, high=None):
    """The mismatch weights of one response, [L] for 'token', a number for the rest. d: [L]."""
    if kind == "none":
        return torch.ones(())
    if kind == "token":
        return torch.minimum(torch.exp(d), torch.tensor(cap))
    if kind == "seq":
        return torch.exp(torch.clamp(d.mean(), -math.log(cap), math.log(cap)))
    high = cap if high is None else high
    values = {"geometric": [d.mean().exp()], "product": [d.sum().exp()], "worst_token": list(d.exp())}[statistic]
    return torch.clamp(d.mean().exp(), max=cap) * float(all(low <= v <= high for v in values))


def ppo(r, A, low=0.2, high=0.2):
    return torch.minimum(r * A, torch.clamp(r, 1 - low, 1 + high) * A)


def surrogate_of(name, D, A, logp):
    """Surrogate of one response: [L] for token objectives, a number for sequence objectives. D: [L], A: number."""
    r, s = torch.exp(D), torch.exp(D.mean())
    if name in ("grpo_tis", "onpolicy_grpo", "mis_grpo"):
        return ppo(r, A)
    if name == "positive_grpo":
        return ppo(r, A) if A > 0 else 0 * r
    if name == "dual_clip":
        return torch.maximum(ppo(r, A), torch.full_like(r, 3 * A)) if A < 0 else ppo(r, A)
    if name == "dapo":
        return ppo(r, A, 0.2, 0.28)
    if name == "cispo":
        return torch.minimum(r, torch.tensor(1.28)).detach() * A * logp
    if name == "sapo":
        tau = 1.0 if A > 0 else 1.05
        return 4 / tau / (1 + torch.exp(-tau * (r - 1))) * A
    if name in ("gspo", "mis_gspo"):
        return ppo(s, A, 3e-4, 4e-4)
    if name == "tbpo":
        return (torch.clamp(s, 0, 1 + 4e-4) if A > 0 else torch.clamp(s, 1 - 3e-4, 1 + 7e-4)) * A
    raise KeyError(name)


# Ratios at which a gradient jumps, by objective; tests keep away from them.
TOKEN_EDGES = (0.8, 1.2, 1.28, 3.0)
RESPONSE_EDGES = (1 - 3e-4, 1 + 4e-4, 1 + 7e-4)
DEFAULT_WEIGHT = {"tbpo": "seq", "gspo": "seq", "mis_gspo": "mis", "mis_grpo": "mis"}
SEQUENCE = ("tbpo", "gspo", "mis_gspo")


def reference(name, log_probs, old, rollout, advantages, mask, kind=None, **weight_hp):
    """(loss, gradient [B, T]) with the means over this batch; advantages [B]."""
    kind = kind or DEFAULT_WEIGHT.get(name, "token")
    x = log_probs.detach().double().requires_grad_()
    per_response = []
    for i in range(len(x)):
        keep = mask[i].bool()
        if not keep.any():
            continue
        logp, o, q = x[i][keep], old[i][keep].double(), rollout[i][keep].double()
        D, d = torch.clamp(logp - o, -20, 20), torch.clamp(o - q, -20, 20)
        w = weight_of(kind, d, **weight_hp)
        S = surrogate_of(name, D, advantages[i].item(), logp)
        if S.ndim == 0 and w.ndim == 1:  # token form: the value of S, each token its own gradient
            g = torch.autograd.grad(S, D, retain_graph=True)[0] * len(D)
            S = S.detach() + g * (D - D.detach())
        per_response.append(w * S)
    if not per_response:
        return torch.zeros(()), torch.zeros_like(x)
    by_response = name in SEQUENCE or name == "sapo"
    J = torch.stack([v.mean() for v in per_response]).mean() if by_response else torch.cat(per_response).mean()
    (-J).backward()
    return -J.detach(), x.grad


def make_batch(seed, rows=8, width=12, spread=3e-4):
    """(log_probs, old, rollout, advantages [B], mask). ``spread`` is of the responses' mean log-ratio."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=g) * 3
    log_probs = old + torch.randn(rows, 1, generator=g) * spread + torch.randn(rows, width, generator=g) * spread
    rollout = old + torch.randn(rows, width, generator=g) * 0.3
    advantages = torch.randn(rows, generator=g)
    advantages[1] = 0.0
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    lengths[2] = 0
    mask = (torch.arange(width) < lengths[:, None]).float()
    return log_probs, old, rollout, advantages, mask
