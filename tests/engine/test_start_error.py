"""An engine that does not start says why, in the error that the driver sees."""

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys

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


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """What appends to this process's two logs."""
    paths = [tmp_path / "out", tmp_path / "log"]
    monkeypatch.setattr(start_error, "own_logs", lambda: [str(path) if path.exists() else None for path in paths])

    def appending(path):
        def append(text):
            with open(path, "a") as file:
                file.write(text)

        return append

    return {path.name: appending(path) for path in paths}


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
def test_a_start_whose_port_was_taken_is_tried_again(logs, causes, tries, error):
    """Each attempt that fails adds its cause to the log; vLLM's own error only points there."""
    calls = []

    async def start():
        calls.append(1)
        logs["out"]("INFO loading\n")
        if len(calls) <= len(causes):
            logs["log"](causes[len(calls) - 1])
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    logs["out"]("INFO starting\n")
    logs["log"]("a warning\n")
    if error is None:
        asyncio.run(started(start))
    else:
        with pytest.raises(EngineStartError, match=error):
            asyncio.run(started(start))
    assert len(calls) == tries


@pytest.mark.parametrize("before, meanwhile", [(0, 0), (2**21, 0), (2**20 - 100, 100), (2**20, 2**19)])
def test_causes_of_before_are_not_told_however_long_the_log_is(logs, before, meanwhile):
    async def start():
        logs["log"]("x" * meanwhile + "\n" + NO_ROOM)
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    logs["log"](PORT + "x\n" * (before // 2) + PORT)
    with pytest.raises(EngineStartError, match="no room$"):
        asyncio.run(started(start))


def terminate() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's driver, which an earlier test may have started here, has a handler
    os.kill(os.getpid(), signal.SIGTERM)


ENDS = {  # what the engine's process does, what is told of it
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was ended by SIGKILL, by hand or by the kernel for want of main memory$"),
    "terminated": (terminate, r"was ended by SIGTERM$"),
    "real-time": (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3), rf"was ended by signal {signal.SIGRTMIN + 3}$"),
    "exit": (lambda: os._exit(3), r"ended with exit code 3$"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_while_it_starts_is_told_with_engine_pid_and_signal(monkeypatch, how):
    """vLLM sees its pipe closed before there is an exit code, and its message has none."""
    end, words = ENDS[how]
    monkeypatch.setattr(start_error, "own_logs", lambda: [None, None])
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


def test_the_logs_are_the_files_that_both_streams_go_to(tmp_path):
    code = "import sys; from qarl_openrlhf.engine import start_error as s; print(s.own_logs(), s.written_so_far(), flush=True)"
    for out in (tmp_path / "out", None):
        with open(tmp_path / "err", "w") as err, open(out or os.devnull, "w") as file:
            where = {"stdout": file if out else subprocess.PIPE, "stderr": err}
            ended = subprocess.run([sys.executable, "-c", "import sys; print('four', file=sys.stderr, flush=True); " + code], text=True, **where)
        said = out.read_text() if out else ended.stdout
        assert said == f"{[str(out) if out else None, str(tmp_path / 'err')]} [0, 5]\n"


def test_an_error_that_vllm_names_itself_is_tried_again_too(monkeypatch):
    monkeypatch.setattr(start_error, "own_logs", lambda: [None, None])
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
