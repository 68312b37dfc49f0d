"""Watching a rollout does not have the device finish its queue for every number: counted by what would wait on a card.

What ``Waits`` cannot see of tensors in main memory (``tolist``, ``cpu``) is counted where it is done, and by tests/gpu/test_waits.py.
"""

import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qarl_openrlhf.metrics import accumulate, diagnostics
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


@pytest.fixture
def transfers(monkeypatch) -> list[int]:
    """How many numbers each transfer of ``as_floats`` brought."""
    made = []
    monkeypatch.setattr(accumulate, "as_floats", lambda values: made.append(len(values)) or as_floats(values))
    return made


def test_a_micro_batch_waits_for_nothing_when_sampled_and_its_numbers_come_in_one_transfer(transfers):
    objective = build_objective("tbpo")
    batch, current = experience()
    batch.weight_versions = torch.where(batch.action_mask.bool(), 3, -1)
    states = objective(current, batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask).tokens
    watch = diagnostics.Diagnostics(CPU)
    watch.begin(objective)
    sums = Sums()
    with Waits() as waits:
        for _ in range(3):
            watch.sampled(batch, sums, version=4)
        sums.merge_ratios({"a": (torch.tensor(1.0), torch.tensor(2))})
        watch.histograms.add_update(current, batch.action_log_probs, batch.advantages, batch.action_mask.bool(), states)
    assert waits.found == [] and transfers == []
    assert sums.ratios["a"] == [1.0, 2.0] and sums.maxima["async/version_lag_max"] == 1.0
    assert len([count for count in transfers if count]) == 1 and transfers[0] > 100


def test_the_metrics_of_a_training_step_are_read_once(transfers):
    """``QarlActorTrainer._collect`` on what OpenRLHF's training step returns."""
    from qarl_openrlhf.actors.learner import QarlActorTrainer
    from qarl_openrlhf.actors.loss import ObjectiveLoss

    batch, current = experience()
    loss = ObjectiveLoss(build_objective("tbpo"))
    loss(current, batch.action_log_probs, batch.advantages, batch.action_mask, batch.rollout_log_probs, dp_size=1, batch_num_tokens=10.0)
    status = {
        "metrics": {"reward": torch.arange(8.0), "ppo_kl": torch.tensor(0.5), "entropy_loss": torch.tensor(2.0), "actor_lr": 1e-6},
        "weights": {"reward": "sample", "ppo_kl": "token", "entropy_loss": "token", "actor_lr": None},
        "num_samples": 8.0,
        "num_action_tokens": 20.0,
    }
    sums = Sums()
    with Waits() as waits:
        for update in range(3):
            learner = types.SimpleNamespace(actor_loss_fn=loss, args=types.SimpleNamespace(algo=types.SimpleNamespace(kl=types.SimpleNamespace(use_loss=True))))
            QarlActorTrainer._collect(learner, sums, status, share=0.5, ends_step=update == 2, epoch_update=update)
    assert waits.found == [] and transfers == []
    metrics = sums.metrics()
    assert metrics["reward"] == 3.5 and metrics["ppo_kl"] == 0.5 and metrics["actor_lr"] == 1e-6 and metrics["policy/entropy"] == 1.0
    assert "objective/in_band_frac_by_update/2" in metrics
    assert len([count for count in transfers if count]) == 1


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
