"""A reward that fails is an error that names it; OpenRLHF's own executor would go on with None."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm import SamplingParams

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
        assert words in str(error) and "reward.py" in str(error) and f"prompt {i}" in str(error)
    assert time.monotonic() - begun < 6


def test_a_good_reward_passes(tmp_path):
    outputs = execute(tmp_path, "return {'rewards': 1.0, 'scores': 0.5, 'extra_logs': {}}")
    assert [(o["reward"], o["scores"]) for o in outputs] == [(1.0, 0.5)] * 3


def test_without_it_a_fault_goes_unnoticed(tmp_path):
    assert [o["reward"] for o in execute(tmp_path, BODIES["raises"][0], strict=False)] == [None] * 3
