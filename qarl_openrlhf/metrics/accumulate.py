"""Metrics as sums, so that means are right however a batch is split over micro-batches and ranks."""

import torch
import torch.distributed as dist


class Sums:
    """Accumulates (numerator, denominator) pairs, extremes and samples; adds the ranks, divides once."""

    def __init__(self):
        self.ratios: dict[str, list[float]] = {}
        self.maxima: dict[str, float] = {}
        self.minima: dict[str, float] = {}
        self.samples: dict[str, list[torch.Tensor]] = {}
        self.quantiles: dict[str, tuple[str, float]] = {}
        self.last: dict[str, float] = {}

    def add(self, name: str, numerator, denominator) -> None:
        pair = self.ratios.setdefault(name, [0.0, 0.0])
        pair[0] += float(numerator)
        pair[1] += float(denominator)

    def merge_ratios(self, ratios: dict) -> None:
        for name, (numerator, denominator) in ratios.items():
            self.add(name, numerator, denominator)

    def maximum(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def minimum(self, name: str, value: float) -> None:
        self.minima[name] = min(self.minima.get(name, value), value)

    def sample(self, name: str, values: torch.Tensor, quantiles: dict[str, float]) -> None:
        """Keep ``values`` (1-D) for the quantiles {metric name: q}."""
        self.samples.setdefault(name, []).append(values.detach().float().flatten().cpu())
        self.quantiles |= {metric: (name, q) for metric, q in quantiles.items()}

    def merge(self, statistics) -> None:
        """Add one micro-batch's statistics: {"ratios": ..., "maxima": ..., "minima": ..., "samples": ...}, each optional."""
        self.merge_ratios(statistics.get("ratios", {}))
        for name, value in statistics.get("maxima", {}).items():
            self.maximum(name, value)
        for name, value in statistics.get("minima", {}).items():
            self.minimum(name, value)
        for name, (values, quantiles) in statistics.get("samples", {}).items():
            self.sample(name, values, quantiles)

    def over_ranks(self) -> "Sums":
        """The same, added over all ranks of the process group (every rank must call it)."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self
        mine = {"ratios": self.ratios, "maxima": self.maxima, "minima": self.minima}
        mine["samples"] = {name: (torch.cat(parts), {}) for name, parts in self.samples.items()}
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        total = Sums()
        for rank in ranks:
            total.merge(rank)
        total.quantiles, total.last = self.quantiles, self.last
        return total

    def metrics(self) -> dict[str, float]:
        """Means, extremes, quantiles and last values. A mean over nothing is left out."""
        metrics = {name: n / d for name, (n, d) in self.ratios.items() if d}
        metrics |= self.maxima | self.minima
        for metric, (name, q) in self.quantiles.items():
            values = torch.cat(self.samples.get(name, [torch.empty(0)]))
            if values.numel():
                metrics[metric] = float(_quantile(values, q))
        return metrics | self.last


def _quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    """Nearest-rank quantile of a 1-D tensor of any length (``torch.quantile`` refuses more than 2**24 values)."""
    k = min(values.numel(), max(1, round(q * values.numel())))
    return values.kthvalue(k).values
