"""No call to an engine's process outlives it."""

import asyncio
import time
from types import SimpleNamespace

import psutil
import pytest
import ray
from vllm import SamplingParams

from qarl_openrlhf.engine import liveness
from qarl_openrlhf.engine.liveness import fail_when_dead
from qarl_openrlhf.engine.state import EngineNotReady

from . import tiny
from .conftest import Bench


class Dead(Exception):
    pass


def run(answer, dies_after=None):
    """What a guarded call returns or raises, and whether the call itself was cancelled."""
    cancelled = []

    async def call(method, *args):
        try:
            return await answer(method, *args)
        except asyncio.CancelledError:
            cancelled.append(method)
            raise

    async def go():
        llm = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call), errored=False)
        fail_when_dead(llm, Dead)
        if dies_after is not None:
            asyncio.get_running_loop().call_later(dies_after, lambda: setattr(llm, "errored", True))
        return await asyncio.wait_for(llm.engine_core.call_utility_async("pause", 1, 2), 5)

    try:
        return asyncio.run(go()), cancelled
    except Exception as error:
        return error, cancelled


def test_an_answer_comes_through(monkeypatch):
    async def answer(*args):
        await asyncio.sleep(0.05)
        return args

    monkeypatch.setattr(liveness, "POLL_S", 0.01)
    assert run(answer) == (("pause", 1, 2), [])


def test_an_error_comes_through():
    async def answer(*args):
        raise ValueError("no")

    error, cancelled = run(answer)
    assert isinstance(error, ValueError) and not cancelled


def test_a_call_of_a_process_that_died_ends():
    async def never(*args):
        await asyncio.Event().wait()

    started = time.monotonic()
    error, cancelled = run(never, dies_after=0.05)
    assert isinstance(error, Dead) and cancelled == ["pause"]
    assert time.monotonic() - started < 1


def test_whoever_waits_for_an_engine_that_dies_is_told(cluster, tmp_path):
    """Stopped before it is asked, then killed: nothing is in flight whose failure would tell."""
    learner = tiny.make_learner("qwen3", "w4a16:g64", tmp_path)
    engine = tiny.start_engine(learner)
    tiny.ready(engine)
    Bench(learner, [engine]).publish()
    process = psutil.Process(tiny.process_id(engine))
    process.suspend()
    tokenizer, params = ray.put(tiny.tokenizer()), SamplingParams(max_tokens=4)
    dispatched = [engine.generate_responses.remote("ab", "", params, 32, tokenizer, ticket=("d", number)) for number in (0, 1)]
    engine.expect.remote("d", [(0, 0), (1, 0)], 7)
    others = [engine.kernels.remote(), engine.pause_generation.remote(), engine.reset_prefix_cache.remote()]
    time.sleep(2)  # all wait for the process
    process.kill()
    for call in dispatched + others:
        with pytest.raises(EngineNotReady, match="engine 0: its process died"):
            ray.get(call, timeout=20)
    ray.kill(engine)
