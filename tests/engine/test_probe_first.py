"""A publish's probe does not wait behind the responses that are waiting for their turn."""

import time

import pytest
import ray
from vllm import SamplingParams

from . import tiny
from .conftest import Bench

pytestmark = pytest.mark.slow


def test_a_probe_goes_before_what_waits(cluster, tmp_path):
    learner = tiny.make_learner("llama", "w4a16:g64", tmp_path)
    engine = tiny.start_engine(learner, max_num_seqs=1, scheduling_policy="priority")  # as engine_args.chosen has it
    tiny.ready(engine)
    bench = Bench(learner, [engine])
    try:
        bench.publish()
        params = SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True)
        calls = [engine.generate.remote([5, 6, 7 + i], params) for i in range(8)]
        while not ray.get(engine.get_num_unfinished_requests.remote(), timeout=30) == 8:
            time.sleep(0.01)
        tiny.probe(engine, [5, 6, 7])
        done, waiting = ray.wait(calls, num_returns=8, timeout=0)
        assert len(waiting) >= 6, f"{len(done)} of 8 responses were finished before the probe"
        assert all(len(output.outputs[0].token_ids) == 48 for output in ray.get(calls, timeout=120))
    finally:
        bench.publisher.close()
        ray.kill(engine)
