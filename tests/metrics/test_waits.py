"""Watching a rollout does not have the device finish its queue for every number: counted by what would wait on a card."""

import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qarl_openrlhf.metrics import diagnostics
from qarl_openrlhf.metrics.accumulate import Sums, as_floats
from qarl_openrlhf.objectives import build_objective
from tests.metrics.test_diagnostics import CPU, experience


class Waits(TorchDispatchMode):
    """Counts operations whose result, or its size, must be known on the host."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if name in self.NAMES or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_a_micro_batch_waits_once_when_sampled_and_never_in_the_histograms():
    objective = build_objective("tbpo")
    batch, current = experience()
    batch.weight_versions = torch.where(batch.action_mask.bool(), 3, -1)
    states = objective(current, batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask).tokens
    watch = diagnostics.Diagnostics(CPU)
    watch.begin(objective)
    sums = Sums()
    with Waits() as waits:
        watch.sampled(batch, sums, version=4)
        sums.merge_ratios({"a": (torch.tensor(1.0), torch.tensor(2))})
    assert waits.found == ["index"]  # the ratios' quantiles: as many as there are tokens
    with Waits() as waits:
        watch.histograms.add_update(current, batch.action_log_probs, batch.advantages, batch.action_mask.bool(), states)
    assert waits.found == []
    assert sums.ratios["a"] == [1.0, 2.0] and sums.maxima["async/version_lag_max"] == 1.0


def test_what_is_outside_the_mask_counts_nowhere_whatever_it_is():
    batch, current = experience()
    mask = batch.action_mask.bool()
    watched = []
    for junk in (0.0, float("nan"), float("inf"), -1e30):
        spoilt = {n: torch.where(mask, getattr(batch, n), junk) for n in ("action_log_probs", "rollout_log_probs", "advantages")}
        piece = types.SimpleNamespace(**vars(batch) | spoilt)
        watch = diagnostics.Diagnostics(CPU)
        watch.begin()
        sums = Sums()
        watch.sampled(piece, sums)
        watch.updated(piece, torch.where(mask, current, junk), None, update=0)
        watched.append((watch.end() | sums.metrics(), {name: counts.tolist() for name, counts in watch.histograms.counts.items()}))
    for metrics, counts in watched[1:]:
        assert counts == watched[0][1]
        assert {k: v for k, v in metrics.items() if "timing" not in k} == {k: v for k, v in watched[0][0].items() if "timing" not in k}


def test_as_floats_keeps_the_order_of_mixed_numbers_and_tensors():
    big = 2**40 + 1
    mixed = [1, torch.tensor(big), 2.5, torch.tensor(0.1), torch.tensor(True), torch.tensor([3.0]), torch.tensor(7)]
    assert as_floats(mixed) == [1.0, float(big), 2.5, float(torch.tensor(0.1)), 1.0, 3.0, 7.0]
    assert as_floats([]) == []


def test_sums_settle_by_themselves_and_leave_out_the_extremes_of_nothing(monkeypatch):
    monkeypatch.setattr("qarl_openrlhf.metrics.accumulate.MOST_PENDING", 4)
    sums = Sums()
    for k in range(10):
        sums.add("mean", torch.tensor(float(k)), 2)
        sums.maximum("most", torch.tensor(float(k)) if k != 9 else torch.tensor(float("nan")))
        sums.minimum("least", torch.tensor(float("nan")))
    assert sums.metrics() == {"mean": 45 / 20, "most": 8.0}


def test_what_waits_keeps_no_graph():
    sums = Sums()
    activation = torch.ones(3, requires_grad=True) * 2
    sums.add("mean", activation.sum(), 3)
    sums.maximum("most", activation.max())
    assert not any(value.requires_grad for _, _, values in sums._pending for value in values if isinstance(value, torch.Tensor))
    assert sums.metrics() == {"mean": 2.0, "most": 2.0}
