"""A reward that fails is an error that names it; OpenRLHF's own executor would go on with None."""

import asyncio
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import ray
from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm import SamplingParams

from qarl_openrlhf.actors.actor_end import ended_actor
from qarl_openrlhf.engine.strict_rewards import RewardError, StrictSingleTurnExecutor

from . import tiny

BODIES = {
    "raises": ("raise KeyError('gold')", "KeyError: 'gold'"),
    "hangs": ("import time; time.sleep(3)", "no answer within 0.5 s"),
    "nan": ("return {'rewards': float('nan'), 'scores': 0.0}", "returned rewards nan"),
    "inf score": ("return {'rewards': 1.0, 'scores': float('inf')}", "returned scores inf"),
    "nothing": ("return None", "it returned nothing; return a dict"),
    "exits": ("import sys; sys.exit(3)", "it called sys.exit(3)"),
    "none": ("return {'rewards': None}", "returned rewards None"),
    "list": ("return [0.5]", "it returned a list [0.5]; return a dict"),
    "number": ("return 0.5", "it returned a float 0.5; return a dict"),
    "text": ("return {'rewards': '1.0'}", "returned rewards '1.0'; a finite number is needed, or a list or tensor of one"),
    "matrix": ("return {'rewards': __import__('torch').tensor([[1, 2], [3, 4]])}", "rewards tensor([[1, 2], [3, 4]]); a finite"),
    "two": ("return {'rewards': [1.0, 0.0]}", "returned rewards [1.0, 0.0]; a finite number"),
    "empty": ("return {'rewards': []}", "returned rewards []; a finite number"),
    "ragged": ("return {'rewards': [[1.0], [1.0, 2.0]]}", "returned rewards [[1.0], [1.0, 2.0]]; a finite number"),
    "huge": ("return {'rewards': 10**400}", "returned rewards 1000"),
    "beyond a float32": ("return {'rewards': 1e39}", "returned rewards 1e+39; a finite number"),
    "dict of scores": ("return {'rewards': 1.0, 'scores': {'a': 1}}", "returned scores {'a': 1}; a finite number"),
    "text log": ("return {'rewards': 1.0, 'extra_logs': {'kind': 'short'}}", "extra_logs {'kind': 'short'}; a dict of numbers by name"),
    "no log": ("return {'rewards': 1.0, 'extra_logs': {'kind': None}}", "extra_logs {'kind': None}; a dict of numbers by name"),
    "two of a log": ("return {'rewards': 1.0, 'extra_logs': {'kind': [1, 2]}}", "extra_logs {'kind': [1, 2]}; a dict of numbers by name"),
    "log without a name": ("return {'rewards': 1.0, 'extra_logs': {1: 0.5}}", "extra_logs {1: 0.5}; a dict of numbers by name"),
    "list of logs": ("return {'rewards': 1.0, 'extra_logs': [0.5]}", "extra_logs [0.5]; a dict of numbers by name"),
    "other key": ("return {'reward': 0.5}", "it returned a dict without rewards {'reward': 0.5}; return a dict"),
}


class Engine:
    """Gives a fixed response: the executor is what is tested here."""

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        await asyncio.sleep(0)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[70, 71], text="ab", finish_reason="stop", logprobs=None)])


def execute(tmp_path, body: str, count: int = 3, strict: bool = True):
    path = tmp_path / "reward.py"
    path.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    executor = SingleTurnAgentExecutor(str(path))
    if strict:
        StrictSingleTurnExecutor.convert(executor, 0.5)

    async def all_of_them():
        calls = [
            executor.execute(f"prompt {i}", "label", SamplingParams(max_tokens=4), 32, tiny.tokenizer(), Engine())
            for i in range(count)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("fault", BODIES)
def test_each_fault_is_named(tmp_path, fault):
    body, words = BODIES[fault]
    begun = time.monotonic()
    for i, error in enumerate(execute(tmp_path, body)):
        assert isinstance(error, RewardError), error
        assert words in str(error) and "reward.py" in str(error) and f"prompt that ends 'prompt {i}'" in str(error)
        assert ("(line 2 in reward_func, " in str(error)) == (fault == "raises")
    assert time.monotonic() - begun < 6


GOOD = {
    "numbers": "{'rewards': 1.0, 'scores': 0.5, 'extra_logs': {'long': 2.0}}",
    "integers": "{'rewards': 1, 'scores': 0.5, 'extra_logs': {'long': 2}}",
    "truth": "{'rewards': True, 'scores': 0.5, 'extra_logs': {'long': 2}}",
    "lists of one": "{'rewards': [1.0], 'scores': [[0.5]], 'extra_logs': {'long': [2]}}",
    "tensors": "{'rewards': torch.ones(()), 'scores': torch.full((1, 1), 0.5), 'extra_logs': {'long': torch.tensor([2])}}",
    "arrays": "{'rewards': np.float32(1), 'scores': np.array([0.5]), 'extra_logs': {'long': np.int64(2)}}",
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_reward_passes_as_plain_numbers(tmp_path, kind):
    outputs = execute(tmp_path, f"import numpy as np, torch; return {GOOD[kind]}")
    assert [(o["reward"], o["scores"], o["extra_logs"]) for o in outputs] == [(1.0, 0.5, {"long": 2.0})] * 3
    assert all(type(number) is float for o in outputs for number in (o["reward"], o["scores"], *o["extra_logs"].values()))


@pytest.mark.parametrize("logs", ["None", "{}"])
def test_scores_are_the_rewards_and_logs_may_be_missing(tmp_path, logs):
    outputs = execute(tmp_path, f"return {{'rewards': [0.25], 'extra_logs': {logs}}}")
    assert [(o["reward"], o["scores"], o["extra_logs"]) for o in outputs] == [(0.25, 0.25, {})] * 3


def test_without_it_a_fault_goes_unnoticed(tmp_path):
    assert [o["reward"] for o in execute(tmp_path, BODIES["raises"][0], strict=False)] == [None] * 3


class RewardActor:
    """Computes rewards as an engine's actor does, in an executor and a process of its own."""

    def __init__(self, path: str):
        self.executor = SingleTurnAgentExecutor(path)
        StrictSingleTurnExecutor.convert(self.executor, 30)

    async def reward(self):
        return await self.executor.execute("prompt", "label", SamplingParams(max_tokens=4), 32, tiny.tokenizer(), Engine())


ENDS = {
    "os._exit": ("import os; os._exit(259)", "ended by itself with exit code 3: os._exit at {path}:2 in reward_func"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "ended by itself with exit code -11 (SIGSEGV): segmentation fault at {path}:2 in reward"),
    "abort": ("import os; os.abort()", "ended by itself with exit code -6 (SIGABRT): aborted at {path}:2 in reward"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "ended without a word: by SIGKILL (the kernel's for want of main memory, or someone's)"),
}


@pytest.mark.parametrize("how", ["segfault", *(pytest.param(how, marks=pytest.mark.slow) for how in ("os._exit", "killed", "abort"))])
def test_a_reward_that_ends_the_process_is_named_with_its_exit_code(cluster, tmp_path, how):
    body, words = ENDS[how]
    path = tmp_path / "reward.py"
    path.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    args = SimpleNamespace(train=SimpleNamespace(agent_func_path=None), reward=SimpleNamespace(remote_url=[str(path)]))
    alive, engine = (ray.remote(num_cpus=0)(RewardActor).remote(str(path)) for _ in range(2))
    ray.get([actor.__ray_ready__.remote() for actor in (alive, engine)])
    names = {actor._actor_id.hex(): f"engine {number}" for number, actor in enumerate((alive, engine))}
    assert ended_actor(names, args) is None
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(engine.reward.remote(), timeout=60)
    message = str(ended_actor(names, args))
    assert message.startswith("engine 1: its process (pid ") and words.format(path=path) in message
    assert f"{path} runs in that process: code that ends it (os._exit, a crash of a C extension) is the likely cause" in message
    assert ("What helps where main memory was full" in message) == (how == "killed")
    assert os.path.isfile(message.rpartition("Log of the process: ")[2])
    args.reward.remote_url = ["http://localhost:1/reward"]
    assert "likely cause" not in str(ended_actor(names, args))
    ray.kill(alive)
    until = time.monotonic() + 60
    with pytest.raises(ray.exceptions.RayActorError):  # a call may overtake the kill
        while time.monotonic() < until:
            ray.get(alive.__ray_ready__.remote(), timeout=60)
            time.sleep(0.05)
    assert ended_actor({alive._actor_id.hex(): "engine 0"}, args) is None  # Ray ended it, not itself


def test_a_fork_of_an_engines_process_ends_without_a_word():
    code = "\n".join(
        (
            "import os",
            "from qarl_openrlhf.rewards.process_end import tell_exits",
            "tell_exits(); tell_exits()",
            "os._exit(5) if os.fork() == 0 else print(os.wait()[1] >> 8)",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
