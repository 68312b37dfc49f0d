"""The reward file of docs/data.md, through the executor that a run has."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl_openrlhf.engine.strict_rewards import StrictSingleTurnExecutor
from qarl_openrlhf.preflight.python_files import check_reward
from tests.tiny_models import make_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


@pytest.mark.parametrize("response, reward, long", [("It is 46.<|im_end|>", 1.0, 0.0), ("46 " * 201, 0.9, 1.0), ("460", 0.0, 0.0)])
def test_the_example(tmp_path, response, reward, long):
    (example,) = re.findall(r"^```python\n(.*?def reward_func.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    path = tmp_path / "reward.py"
    path.write_text(example)
    flags = SimpleNamespace(remote_url=[str(path)], model_name_or_path=None)
    check_reward(SimpleNamespace(train=SimpleNamespace(agent_func_path=None), reward=flags))
    tokenizer = make_tokenizer()

    class Engine:
        async def generate(self, prompt_token_ids, params, multi_modal_data=None):
            ids = tokenizer(response, add_special_tokens=False)["input_ids"]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, finish_reason="stop", logprobs=None)])

    executor = StrictSingleTurnExecutor(str(path))
    params = SimpleNamespace(max_tokens=600, logprobs=None)
    output = asyncio.run(executor.execute("<|im_start|>12 + 34 =", "46", params, 1000, tokenizer, Engine()))
    assert (output["reward"], output["extra_logs"]) == (pytest.approx(reward), {"long": long})
    assert output["scores"] == float(reward > 0.5)
