"""On a card: watching a rollout and moving its micro-batches there make no call that waits for the device."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from qarl_openrlhf.actors.micro_batches import to_device
from qarl_openrlhf.metrics.accumulate import Sums
from qarl_openrlhf.metrics.diagnostics import Diagnostics
from qarl_openrlhf.patches.openrlhf_experience import StampedExperience
from tests.metrics.test_diagnostics import experience


@contextmanager
def waiting_is_an_error():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stamped() -> tuple[StampedExperience, torch.Tensor]:
    fields, current = experience()
    batch = StampedExperience(**vars(fields))
    batch.weight_versions = torch.where(batch.action_mask.bool(), 3, -1)
    batch.info = {"reward": list(torch.rand(8)), "kl": torch.rand(8)}
    return batch, current


def watched(device: torch.device, batch, current, guard):
    watch, sums = Diagnostics(device), Sums()
    watch.begin()
    current = current.to(device)
    with guard():
        to_device(batch, device)
        watch.sampled(batch, sums, version=4)
        watch.histograms.add_update(current, batch.action_log_probs, batch.advantages, batch.action_mask.bool())
    return watch.end() | sums.metrics(), watch.histograms.counts


def test_a_micro_batch_is_moved_and_watched_without_waiting():
    card = torch.device("cuda", 0)
    batch, current = stamped()
    found, counts = watched(card, batch, current, waiting_is_an_error)
    assert batch.sequences.device == card and batch.info["reward"].shape == (8,) and not batch.info["reward"].is_cuda
    assert found["timing/diagnostics"] > 0
    expected, expected_counts = watched(torch.device("cpu"), *stamped(), nullcontext)
    for name, value in expected.items():
        assert name.startswith("timing") or found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name in expected_counts:
        assert torch.equal(counts[name].cpu(), expected_counts[name]), name
