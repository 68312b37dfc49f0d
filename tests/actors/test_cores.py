"""Threads of a learner: an optimizer in main memory must not be left with the one that Ray and torchrun give a process."""

from types import SimpleNamespace as N

import pytest
import torch

from qarl_openrlhf.actors import cores
from qarl_openrlhf.bench.step_learner import StepLearner


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "cuda, offload, given, expected",
    [
        (False, False, None, 6),
        (False, False, "2", 2),
        (True, True, None, 3),
        (True, True, "1", 3),  # Ray's and torchrun's own
        (True, True, "4", 5),  # the user's: as it was
        (True, False, "1", 5),
    ],
)
def test_share_of_the_cores(monkeypatch, threads, cuda, offload, given, expected):
    torch.set_num_threads(5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(cores, "available_cpus", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    cores.use_cores(N(ds=N(adam_offload=offload)), N(num_gpus_per_node=2))
    assert threads() == expected


def test_more_learners_than_cores_have_one_each(monkeypatch, threads):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cores, "available_cpus", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cores.use_cores(N(ds=N(adam_offload=True)), N(num_gpus_per_node=8))
    assert threads() == 1


def test_a_measured_learner_has_those_of_a_run(monkeypatch):
    """Before DeepSpeed makes the optimizer, whose threads are those of that moment."""
    asked = []

    def use(args, group):
        asked.append((args, group))
        raise InterruptedError

    monkeypatch.setattr(cores, "use_cores", use)
    args = N(actor=object())
    with pytest.raises(InterruptedError):
        StepLearner(args, None, "cuda")
    assert asked == [(args, args.actor)]
