"""Metrics as sums, so that means are right however a batch is split over micro-batches and ranks."""

import math

import torch
import torch.distributed as dist

MOST_PENDING = 1 << 14  # entries that wait on the device, of one or two numbers, each half a kilobyte there


class Sums:
    """Accumulates (numerator, denominator) pairs, extremes and samples; adds the ranks, divides once.

    Tensors that are added stay where they are until something is read: a number at a time would have the device finish what is
    queued hundreds of times a step, which costs seconds on a card that other processes use, too.
    """

    def __init__(self):
        self._pending: list[tuple[str, str, tuple]] = []
        self._ratios: dict[str, list[float]] = {}
        self._extremes: dict[str, dict[str, float]] = {"maxima": {}, "minima": {}}
        self.samples: dict[str, list[torch.Tensor]] = {}
        self.quantiles: dict[str, tuple[str, float]] = {}
        self.last: dict[str, float] = {}

    def add(self, name: str, numerator, denominator) -> None:
        """Numbers or tensors of one element."""
        self._later("ratios", name, (numerator, denominator))

    def merge_ratios(self, ratios: dict) -> None:
        for name, pair in ratios.items():
            self.add(name, *pair)

    def maximum(self, name: str, value) -> None:
        """A number or a tensor of one element; NaN, the extreme of nothing, is left out."""
        self._later("maxima", name, (value,))

    def minimum(self, name: str, value) -> None:
        """See :meth:`maximum`."""
        self._later("minima", name, (value,))

    def _later(self, kind: str, name: str, values: tuple) -> None:
        # Detached: what waits here must not keep a micro-batch's graph alive.
        self._pending.append((kind, name, tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values)))
        if len(self._pending) >= MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        numbers = iter(as_floats([value for _, _, values in pending for value in values]))
        for kind, name, _ in pending:
            if kind == "ratios":
                pair = self._ratios.setdefault(name, [0.0, 0.0])
                pair[0] += next(numbers)
                pair[1] += next(numbers)
            elif not math.isnan(value := next(numbers)):
                known = self._extremes[kind]
                known[name] = (max if kind == "maxima" else min)(known.get(name, value), value)

    @property
    def ratios(self) -> dict[str, list[float]]:
        self._settle()
        return self._ratios

    @property
    def maxima(self) -> dict[str, float]:
        self._settle()
        return self._extremes["maxima"]

    @property
    def minima(self) -> dict[str, float]:
        self._settle()
        return self._extremes["minima"]

    def sample(self, name: str, values: torch.Tensor, quantiles: dict[str, float]) -> None:
        """Keep ``values`` for the quantiles {metric name: q}; those that are NaN are left out when they are read."""
        self.samples.setdefault(name, []).append(values.detach().float().flatten())
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
        mine["samples"] = {name: (self._sampled(name), {}) for name in self.samples}
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
        sampled = {name: self._sampled(name) for name in {name for name, _ in self.quantiles.values()}}
        for metric, (name, q) in self.quantiles.items():
            if sampled[name].numel():
                metrics[metric] = float(_quantile(sampled[name], q))
        return metrics | self.last

    def _sampled(self, name: str) -> torch.Tensor:
        values = torch.cat(self.samples.get(name, [torch.empty(0)])).cpu()
        return values[~values.isnan()]


def as_floats(values: list) -> list[float]:
    """Numbers and tensors of one element as floats: one transfer for each device and dtype."""
    found, groups = [0.0] * len(values), {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            groups.setdefault((value.device, value.dtype), []).append(place)
        else:
            found[place] = float(value)
    for places in groups.values():
        for place, number in zip(places, torch.stack([values[i].reshape(()) for i in places]).tolist(), strict=True):
            found[place] = float(number)
    return found


def _quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    """Nearest-rank quantile of a 1-D tensor of any length (``torch.quantile`` refuses more than 2**24 values)."""
    k = min(values.numel(), max(1, round(q * values.numel())))
    return values.kthvalue(k).values
