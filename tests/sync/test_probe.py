"""The probe's order of events: engines whose KV caches are asleep are woken after the learners have let their memory go."""

from types import SimpleNamespace

import pytest
import torch

from qarl_openrlhf.quant.cache import QuantCache
from qarl_openrlhf.sync import probe
from qarl_openrlhf.sync.probe import LogprobProbe, ProbeError

VOCABULARY = 7


@pytest.fixture
def events(monkeypatch):
    """What happened, in order. Engines give their answers at once; there is one process."""
    happened = []
    monkeypatch.setattr(probe.ray, "get", lambda refs, timeout: refs)
    return happened


def learner(events):
    def forward(ids, attention_mask):
        events.append("learner")
        return {"logits": torch.zeros(*ids.shape, VOCABULARY)}

    network = torch.nn.Linear(1, 1)
    network.quant_cache, network.device = QuantCache(), torch.device("cpu")
    return SimpleNamespace(network=network, model=forward)


def engine(events, shift: float = 0.0):
    def call(name, answer):
        return SimpleNamespace(remote=lambda *args, **kwargs: (events.append((name, *args, *kwargs.values())), answer)[1])

    log_probs = [[-float(torch.log(torch.tensor(VOCABULARY))) + shift] * 3]
    return SimpleNamespace(wake_up=call("wake", None), probe_logprobs=call("probe", log_probs))


def probing(**more):
    return LogprobProbe(lambda text, add_special_tokens: {"input_ids": [1, 2, 3, 4, 5]}, max_tokens=4, tolerance=0.1, timeout_s=1, **more)


def test_sleeping_engines_are_woken_before_they_are_asked(events):
    metrics = probing(barrier=lambda: events.append("barrier")).run(learner(events), [engine(events), engine(events, 0.05)], 1, is_sender=True)
    assert metrics["sync/probe_abs_logp"] == pytest.approx(0.05, abs=1e-6)
    asked = [("probe", [[1, 2, 3, 4]])] * 2
    assert events == ["learner", "barrier", *[("wake", ["kv_cache"])] * 2, *asked]


def test_ranks_that_do_not_ask_let_their_memory_go_too(events):
    assert probing(barrier=lambda: events.append("barrier")).run(learner(events), [engine(events)], 1, is_sender=False) == {}
    assert events == ["learner", "barrier"]


def test_engines_that_are_awake_are_asked_at_once(events):
    probing().run(learner(events), [engine(events)], 1, is_sender=True)
    assert [event if isinstance(event, str) else event[0] for event in events] == ["learner", "probe"]


@pytest.mark.parametrize("shift", [0.2, float("nan")])
def test_an_engine_that_disagrees_is_named(events, shift):
    with pytest.raises(ProbeError, match="engine 1 disagrees with the learner after publishing version 3"):
        probing().run(learner(events), [engine(events), engine(events, shift)], 3, is_sender=True)
