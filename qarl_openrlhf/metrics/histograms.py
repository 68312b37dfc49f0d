"""Counts of tokens by sign of the advantage, old probability and log-ratio: where a rollout's ratios and weights lie.

Every histogram has fixed bins, so that micro-batches, ranks, steps and runs add up, and a step costs a few kilobytes however
long its responses are. All counts are of response tokens but those of ``seq_ratio``, which are of responses.

    mismatch     sign x old probability x log pi_old,learner - log pi_sampler
    ratio        sign x old probability x log pi_current - log pi_old          over all updates of the rollout
    weight       sign x old probability x log w                                the objective's mismatch weight; w = 0 is in the first bin
    region       sign x old probability x REGIONS                              below, inside, above its band, or rejected
    seq_ratio    sign x mean over the response of log pi_current - log pi_old
    old_current  sign x old probability x current probability                  (finer bins)
"""

import torch
import torch.distributed as dist
from torch import Tensor

from qarl_openrlhf.objectives import REGIONS

SIGNS = ("A < 0", "A = 0", "A > 0")
# Upper ends of the bins of the old probability; the last bin ends at 1. Below 1e-3 a token counts as an error token.
PROB_EDGES = (1e-3, 1e-2, 0.1, 0.5, 0.9)
# Symmetric and logarithmic, four bins a decade from 1e-5 to 18 nats, and one around 0: TBPO's bands are 3e-4, error tokens nats.
_MAGNITUDES = tuple(1e-5 * 10 ** (k / 4) for k in range(26))
LOG_RATIO_EDGES = (*(-m for m in reversed(_MAGNITUDES)), *_MAGNITUDES)
FINE_PROB_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 0.99, 0.999)

_EDGES = {"sign": SIGNS, "old_prob": PROB_EDGES, "log_ratio": LOG_RATIO_EDGES, "region": REGIONS, "prob": FINE_PROB_EDGES}
_NAMED = ("sign", "region")  # axes whose entries are names of bins rather than edges between bins
AXES = {
    "mismatch": ("sign", "old_prob", "log_ratio"),
    "ratio": ("sign", "old_prob", "log_ratio"),
    "weight": ("sign", "old_prob", "log_ratio"),
    "region": ("sign", "old_prob", "region"),
    "seq_ratio": ("sign", "log_ratio"),
    "old_current": ("sign", "prob", "prob"),
}


def bins(axis: str) -> int:
    return len(_EDGES[axis]) + (axis not in _NAMED)


def shape(name: str) -> tuple[int, ...]:
    return tuple(bins(axis) for axis in AXES[name])


def description() -> dict:
    """What a reader of the counts needs: the axes of each histogram, and the bins (names or edges) of each axis."""
    return {"axes": {name: list(axes) for name, axes in AXES.items()}, "bins": {name: list(e) for name, e in _EDGES.items()}}


class Histograms:
    """int64 counts of one rollout; every method takes float32 [B, A] tensors and a mask, whatever is outside the mask."""

    def __init__(self, device: torch.device):
        self.counts = {name: torch.zeros(shape(name), dtype=torch.int64, device=device) for name in AXES}
        as_tensor = lambda edges: torch.tensor(edges, dtype=torch.float32, device=device)  # noqa: E731
        self._log_ratio = as_tensor(LOG_RATIO_EDGES)
        self._log_prob = as_tensor(PROB_EDGES).log()
        self._fine_log_prob = as_tensor(FINE_PROB_EDGES).log()

    # Nothing here is of a size that depends on the mask, and whole numbers are added: no call waits for the device, and any order
    # of the additions gives the same counts.

    def add_mismatch(self, old: Tensor, sampler: Tensor, advantages: Tensor, mask: Tensor) -> None:
        self._count("mismatch", mask, _sign(advantages), self._old_prob(old), self._ratio_bin(old - sampler))

    def add_update(self, current: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, states=None) -> None:
        """``states``: the objective's ``TokenStates``, where there is an objective."""
        lengths = mask.sum(-1)
        mean = torch.where(mask, current - old, 0.0).sum(-1) / lengths.clamp(min=1)
        # A response's advantages have one sign for all estimators but GAE; there it is that of their mean.
        row_sign = _sign(torch.where(mask, advantages, 0.0).sum(-1))
        self._count("seq_ratio", lengths > 0, row_sign, self._ratio_bin(mean))
        sign, prob = _sign(advantages), self._old_prob(old)
        self._count("ratio", mask, sign, prob, self._ratio_bin(current - old))
        fine = (torch.bucketize(x, self._fine_log_prob) for x in (old, current))
        self._count("old_current", mask, sign, *fine)
        if states is not None:
            self._count("weight", mask, sign, prob, self._ratio_bin(states.weight.log()))
            self._count("region", mask, sign, prob, states.region)

    def _old_prob(self, log_probs: Tensor) -> Tensor:
        return torch.bucketize(log_probs, self._log_prob)

    def _ratio_bin(self, log_ratio: Tensor) -> Tensor:
        return torch.bucketize(log_ratio, self._log_ratio)

    def _count(self, name: str, mask: Tensor, *indices: Tensor) -> None:
        flat = torch.zeros_like(mask, dtype=torch.int64)
        for index, size in zip(indices, shape(name), strict=True):
            flat = flat * size + index
        flat = torch.where(mask, flat, 0)  # what is outside the mask may be anything
        self.counts[name].view(-1).scatter_add_(0, flat.flatten(), mask.flatten().long())

    def over_ranks(self) -> dict[str, Tensor]:
        """The counts on the CPU, added over all ranks (every rank must call it)."""
        flat = torch.cat([counts.flatten() for counts in self.counts.values()])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        parts = flat.cpu().split([counts.numel() for counts in self.counts.values()])
        return {name: part.view(shape(name)) for name, part in zip(self.counts, parts)}


def _sign(advantages: Tensor) -> Tensor:
    return (advantages > 0).long() - (advantages < 0).long() + 1


def sparse(counts: dict[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """{name: {"at": flat indices of the bins that hold anything, "n": their counts}}; empty histograms are left out."""
    found = {}
    for name, tensor in counts.items():
        flat = tensor.flatten()
        at = flat.nonzero().flatten()
        if len(at):
            found[name] = {"at": at.tolist(), "n": flat[at].tolist()}
    return found


def out_of_band_fractions(region: Tensor) -> dict[str, float]:
    """``objective/out_of_band_frac_{pos,neg}_by_prob/<p>``: share of the tokens with an old probability up to p (and above the p
    before) that lie outside their band or were rejected. ``region``: the counts [sign, old_prob, region]."""
    metrics = {}
    for index, sign in ((2, "pos"), (0, "neg")):
        for upper, counts in zip((*PROB_EDGES, 1.0), region[index].tolist()):
            if total := sum(counts):
                metrics[f"objective/out_of_band_frac_{sign}_by_prob/{upper:g}"] = 1 - counts[REGIONS.index("inside")] / total
    return metrics
