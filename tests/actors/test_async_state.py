"""What the generator of an asynchronous run puts into the queue is what a checkpoint of the trainer must know."""

from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.actors import trainer
from qarl_openrlhf.actors.trainer import QarlTrainingActor, _StatefulQueue


class Queue(list):
    def put(self, payload, block):
        self.append(payload)


def generator(*, exhausted=False, buffer=(), evaluated=0):
    state = {"exhausted": exhausted, "sample_buffer": list(buffer), "prompts_sent": 12}
    return N(evaluated=evaluated, samples_generator=N(rollout_state=lambda: dict(state)))


@pytest.mark.parametrize(
    "exhausted, buffer, episode",
    [(False, [], 1), (False, ["response"], 1), (True, ["response"], 1), (True, [], 2)],  # the last: nothing of this episode is left
)
def test_a_rollout_carries_the_generators_state(exhausted, buffer, episode):
    queue = Queue()
    states = {"episode": 1, "total_consumed_prompts": 12, "data_loader_state_dict": {}}
    _StatefulQueue(queue, generator(exhausted=exhausted, buffer=buffer)).put((["sample"], states, None, 1.5), block=True)
    [(samples, kept, rate, seconds)] = queue
    assert (samples, rate, seconds) == (["sample"], None, 1.5)
    assert kept["episode"] == episode and kept["rollout"] == {"exhausted": exhausted, "sample_buffer": buffer, "prompts_sent": 12}


def test_an_evaluation_has_the_step_of_the_weights_it_judged():
    queue = Queue()
    _StatefulQueue(queue, generator(evaluated=7)).put(("eval", 6, {"accuracy": 0.5}), block=True)
    assert queue == [("eval", 7, {"accuracy": 0.5})]


def test_the_end_is_passed_on():
    queue = Queue()
    _StatefulQueue(queue, generator()).put("done", block=True)
    assert queue == ["done"]


def test_a_publish_alone_pauses_and_resumes_what_samples(monkeypatch):
    """OpenRLHF's calls around it have no time limit, and would resume engines whose weights are half new."""
    monkeypatch.setattr(trainer.ReportingTrainer, "__init__", lambda self: setattr(self, "_partial_rollout", True))
    assert QarlTrainingActor()._partial_rollout is False
