"""What training frees stays with the learner unless something else on its GPU wants it."""

from types import SimpleNamespace

import pytest
import torch

from qarl_openrlhf.actors import policy
from tests.actors.conftest import learner_args
from tests.tiny_models import save_tiny_model

COLOCATED = {"train.colocate_all": True}


@pytest.fixture
def changed(tmp_path):
    """Resolved arguments, with changes that a CPU run may not ask for."""

    def make(changes: dict):
        args = learner_args(save_tiny_model(tmp_path / "model", "qwen3", hidden=128))
        for name, value in changes.items():
            *groups, last = name.split(".")
            place = args
            for group in groups:
                place = getattr(place, group)
            assert hasattr(place, last), name
            setattr(place, last, value)
        return args

    return make


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ({}, False),
        (COLOCATED, False),
        (COLOCATED | {"vllm.enable_sleep": True}, True),
        (COLOCATED | {"algo.kl.init_coef": 0.01}, True),
        ({"algo.kl.init_coef": 0.01}, True),
    ],
)
def test_who_wants_memory(flags, wanted, changed):
    assert policy.others_want_memory(changed(flags)) is wanted


@pytest.mark.parametrize("free, sleeps, released", [(0.5, False, 0), (0.05, False, 1), (0.5, True, 2)])
def test_memory_is_given_back_where_it_is_wanted_or_short(free, sleeps, released, changed, monkeypatch):
    args = changed(COLOCATED | {"vllm.enable_sleep": sleeps})
    calls = []
    for name, value in {
        "is_available": lambda: True,
        "mem_get_info": lambda: (free * 100, 100),
        "empty_cache": lambda: calls.append("empty_cache"),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(policy, "resume_random_state", lambda strategy: None)
    actor = object.__new__(policy.QarlPolicyActor)
    actor.strategy = SimpleNamespace(args=args)
    actor.actor = torch.nn.Linear(1, 1).eval()
    emptied = []
    actor.trainer = SimpleNamespace(
        ppo_train=lambda kl: {"trained": kl, "train_mode": actor.actor.training},
        replay_buffer=SimpleNamespace(clear=lambda: emptied.append(True)),
    )
    assert actor.fit(0.5) == {"trained": 0.5, "train_mode": True}
    assert emptied == [True] and calls == ["empty_cache"] * released
