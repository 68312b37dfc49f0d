"""What a start waits for is said when it begins and when it is over, with seconds; a failure is left to the error."""

import re
import time

import pytest

from qarl_openrlhf.metrics.startup import Startup


def test_waiting_is_said_at_both_ends():
    lines = []
    startup = Startup(show=lambda line, flush: lines.append(line))
    with startup.waiting("Ray", "Ray is up"):
        time.sleep(0.6)
        assert lines == ["start: Ray ..."]
    assert lines[1:] == ["start: Ray is up, 1 s"]
    with pytest.raises(RuntimeError), startup.waiting("engine", "engine ready"):
        raise RuntimeError("no memory")
    assert lines[2:] == ["start: engine ..."]


def test_what_others_wait_for_is_watched(small_ray):
    import ray

    @ray.remote(num_cpus=0)
    def load(seconds: float, fails: bool = False):
        time.sleep(seconds)
        if fails:
            raise ValueError("no such model")

    lines = []
    startup = Startup(show=lambda line, flush: lines.append(line))
    startup.watch("engine 0 starts vLLM", "engine 0 ready", [load.remote(0.3), load.remote(1.2)])
    startup.watch("learner loads its model", "learner ready", [load.remote(0.1, fails=True)])
    for watcher in startup.watchers:
        watcher.join(60)
    assert lines[:2] == ["start: engine 0 starts vLLM ...", "start: learner loads its model ..."]
    assert [re.sub(r"\d+ s$", "N s", line) for line in lines[2:]] == ["start: engine 0 ready, N s"]
