"""An engine that does not start says why, in the error that the driver sees."""

import pytest
import ray

from qarl_openrlhf.engine.start_error import root_cause

from . import tiny
from .conftest import Bench

LOG = """
(Worker_TP1 pid=31606) ERROR 11-28 07:32:49 [multiproc_executor.py:944] Traceback (most recent call last):
(Worker_TP1 pid=31606) ERROR 11-28 07:32:49 [multiproc_executor.py:944] RuntimeError: Insufficient space in /dev/shm: 240 MiB
(EngineCore pid=31098) Exception: WorkerProc initialization failed due to an exception in a background process.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""


def test_the_first_cause_is_found():
    assert root_cause(LOG) == "RuntimeError: Insufficient space in /dev/shm: 240 MiB"
    core = "(EngineCore pid=7) qarl_openrlhf.quant.errors.QuantError: layer x does not fit\n" + LOG.splitlines()[-1]
    assert root_cause(core) == "qarl_openrlhf.quant.errors.QuantError: layer x does not fit"
    assert root_cause("INFO nothing\n" + LOG.splitlines()[-1]) is None


@pytest.mark.slow
def test_a_layer_that_the_engine_rejects_is_named(cluster, tmp_path):
    """K = 192 has groups of 64, which the learner uses, but none of 128, which this engine is told to use."""
    learner = tiny.make_learner("qwen3", "w4a16:g64", tmp_path)
    engine = tiny.start_engine(learner, qarl_scheme="w4a16")
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"QuantError: .*model\.layers\.0\.mlp\.down_proj.*w4a16:g64"):
        ray.get(engine.weights_state.remote(), timeout=240)


@pytest.mark.slow
def test_what_an_engine_died_of_is_named(cluster, tmp_path):
    """Heads of 16 are none that vLLM's attention on a CPU knows: its process ends in the first batch."""
    learner = tiny.make_learner("qwen3", "w4a16:g32", tmp_path, head_dim=16)
    engine = tiny.start_engine(learner)
    tiny.ready(engine)
    Bench(learner, [engine]).publish()
    with pytest.raises(Exception, match=r"its process died while it scored a text: RuntimeError: Unsupported CPU attention.*head_dim=16"):
        tiny.probe(engine, [5, 6, 7, 8])
