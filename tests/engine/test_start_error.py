"""An engine that does not start says why, in the error that the driver sees."""

import asyncio
import multiprocessing
import os
import re
import signal

import pytest
import ray

from qarl_openrlhf.engine import start_error
from qarl_openrlhf.engine.start_error import EngineStartError, root_cause, started

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


PORT = "(EngineCore pid=7) torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 4\n"
NO_ROOM = "(EngineCore pid=8) RuntimeError: no room\n"


@pytest.mark.parametrize(
    "causes, tries, error",
    [
        ([], 1, None),
        ([PORT], 2, None),
        ([PORT, PORT], 3, None),
        ([PORT, PORT, PORT, PORT], 3, "DistNetworkError"),
        ([NO_ROOM], 1, "no room"),
        ([PORT, NO_ROOM], 2, "no room"),
    ],
)
def test_a_start_whose_port_was_taken_is_tried_again(monkeypatch, causes, tries, error):
    """Each attempt that fails adds its cause to the log; vLLM's own error only points there."""
    out, log, calls = ["INFO starting\n"], ["a warning\n"], []
    monkeypatch.setattr(start_error, "own_output", lambda: ["".join(out), "".join(log)])

    async def start():
        calls.append(1)
        out.append("INFO loading\n")
        if len(calls) <= len(causes):
            log.append(causes[len(calls) - 1])
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    if error is None:
        asyncio.run(started(start))
    else:
        with pytest.raises(EngineStartError, match=error):
            asyncio.run(started(start))
    assert len(calls) == tries


def terminate() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's driver, which an earlier test may have started here, has a handler
    os.kill(os.getpid(), signal.SIGTERM)


ENDS = {  # what the engine's process does, what is told of it
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was ended by SIGKILL, by hand or by the kernel for want of main memory$"),
    "terminated": (terminate, r"was ended by SIGTERM$"),
    "exit": (lambda: os._exit(3), r"ended with exit code 3$"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_while_it_starts_is_told_with_engine_pid_and_signal(monkeypatch, how):
    """vLLM sees its pipe closed before there is an exit code, and its message has none."""
    end, words = ENDS[how]
    monkeypatch.setattr(start_error, "own_output", lambda: ["", ""])
    before = multiprocessing.process.BaseProcess.start
    made = []

    async def start():
        made.append(multiprocessing.get_context("fork").Process(target=end))
        made[0].start()
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

    with pytest.raises(EngineStartError) as raised:
        asyncio.run(started(start, "engine 1"))
    assert re.match(rf"engine 1: vLLM did not start: its process \(pid {made[0].pid}\) {words}", str(raised.value))
    assert multiprocessing.process.BaseProcess.start is before


def test_an_error_that_vllm_names_itself_is_tried_again_too(monkeypatch):
    monkeypatch.setattr(start_error, "own_output", lambda: ["", ""])
    calls = []

    async def start():
        calls.append(1)
        raise RuntimeError("[Errno 98] Address already in use" if len(calls) == 1 else "something else")

    with pytest.raises(RuntimeError, match="something else"):
        asyncio.run(started(start))
    assert len(calls) == 2


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
