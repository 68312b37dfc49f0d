"""The order of a start in which engine and learner take turns: processes side by side, models only while the engine sleeps."""

import time
from pathlib import Path

import pytest
import ray

from qarl_openrlhf.actors.install import _Group
from qarl_openrlhf.metrics.startup import Startup


class Engine:
    def __init__(self, directory: Path):
        self.directory = directory

    def sleep(self):
        """Answers once the learner's process is up: the call would wait for ever if that process waited for it."""
        deadline = time.monotonic() + 120
        while not (self.directory / "learner").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("no learner's process beside an engine that loads")
            time.sleep(0.05)
        (self.directory / "asleep").touch()

    def no_memory(self):
        raise MemoryError("engine")


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """Class of the learner's actors of a run that starts."""

    @ray.remote
    class Learner:
        def __init__(self, world, rank, address, port):
            (tmp_path / "learner").touch()

        def init_model_from_pretrained(self):
            return (tmp_path / "asleep").exists()

    monkeypatch.setattr(_Group, "startup", Startup(show=lambda line, flush: None), raising=False)
    monkeypatch.setattr(_Group, "actor_classes", {"learner": Learner}, raising=False)
    monkeypatch.setattr(_Group, "awaited", [])
    return Learner


def test_a_learners_process_starts_beside_engines_and_loads_while_they_sleep(small_ray, tmp_path, learner):
    engine = ray.remote(num_cpus=0)(Engine).remote(tmp_path)
    _Group.load_after([engine], "sleep")
    learners = _Group(1, 1, learner, num_gpus_per_actor=0)
    assert ray.get(learners.async_init_model_from_pretrained()) == [True]


def test_an_engine_that_cannot_start_ends_the_start(small_ray, tmp_path, learner):
    _Group.load_after([ray.remote(num_cpus=0)(Engine).remote(tmp_path)], "no_memory")
    learners = _Group(1, 1, learner, num_gpus_per_actor=0)
    with pytest.raises(MemoryError, match="engine"):
        learners.async_init_model_from_pretrained()
