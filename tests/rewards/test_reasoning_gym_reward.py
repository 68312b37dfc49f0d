"""The reward file as OpenRLHF loads and calls it."""

import asyncio
import json

import pytest

from qarl_openrlhf.data.reasoning_gym import prompt_rows
from qarl_openrlhf.rewards import reasoning_gym as rewards

PROMPT = "7 + 1 = 8\n3 + 6 ="
LABEL = json.dumps({"task": "chain_sum", "answer": "9", "metadata": {}})


def reward(response, prompt=PROMPT, label=LABEL):
    return rewards.reward_func([prompt + response], [prompt], [label])["rewards"]


@pytest.mark.parametrize("response", [" 9\n", " 9", "9\n", " 9  \n", " 9<|im_end|>", " 9\n<|im_end|>", " 9<eos>", " 9<end_of_turn>\n", " 9\n8 + 8 = 16\n", " 9.0\n"])
def test_right_answers(response):
    assert reward(response) == 1.0


@pytest.mark.parametrize(
    "response",
    ["", "\n", " 8\n", " 19\n", " 9 apples\n", " 9, 10, 11\n", " 9 9\n", "\n9", " nine\n", " = 9\n", " 9 + 0\n", "<|im_end|>9", " NaN\n"],
)
def test_anything_but_the_answer_alone_on_the_first_line_earns_nothing(response):
    assert reward(response) == 0.0


def test_part_marks_of_the_scorer_are_logged_not_paid():
    result = rewards.reward_func([PROMPT + " 9 apples\n"], [PROMPT], [LABEL])
    assert result["rewards"] == result["scores"] == 0.0
    assert 0 < result["extra_logs"]["scorer_mark"] < 1


def test_answer_tags_win_over_the_first_line():
    assert reward(" Let me think.\n<answer>8</answer> no,\n<answer> 9 </answer>\n") == 1.0
    assert reward(" 9\n<answer>8</answer>") == 0.0


def test_prompt_cut_from_the_left_is_found():
    cut = PROMPT[6:]
    assert rewards.reward_func([cut + " 9\n"], [PROMPT], [LABEL])["rewards"] == 1.0
    with pytest.raises(ValueError, match="not at the beginning of the decoded text"):
        rewards.reward_func(["9"], [PROMPT], [LABEL])


def test_labels_of_another_kind_are_an_error_naming_the_flag():
    for label in ("", "9", None):
        with pytest.raises(ValueError, match="--data.label_key"):
            rewards.reward_func([PROMPT + " 9"], [PROMPT], [label])


def test_scorer_that_raises_means_unsolved(monkeypatch):
    class Broken:
        def score_answer(self, answer, entry):
            raise KeyError("unguarded parser")

    monkeypatch.setattr(rewards, "scorer", lambda task: Broken())
    assert reward(" 9\n") == 0.0


@pytest.mark.parametrize("task", ["chain_sum", "products", "spell_backward", "gcd", "gsm_symbolic"])
def test_every_task_s_own_answer_is_right(task):
    for row in prompt_rows(task, 3):
        answer = json.loads(row["label"])["answer"]
        assert reward(f" {answer}\n", row["input"], row["label"]) == 1.0
        if task in ("chain_sum", "products", "gcd"):  # other scorers take the answer out of any text
            assert reward(f" {answer} or so\n", row["input"], row["label"]) == 0.0


def test_openrlhf_s_executor_takes_it(tmp_path):
    """Through SingleTurnAgentExecutor, which swallows every exception of a reward function: a wrong interface shows as None."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    executor = SingleTurnAgentExecutor(rewards.__file__)

    class Engine:
        async def generate(self, prompt_ids, params, multi_modal_data=None):
            class Output:
                token_ids, finish_reason, logprobs = [ord(c) for c in " 9\n"], "stop", None

            return type("Request", (), {"outputs": [Output]})

    class Tokenizer:
        def __call__(self, text, **kwargs):
            import torch

            return {"input_ids": torch.tensor([[ord(c) for c in text]])}

        def decode(self, ids, **kwargs):
            return "".join(map(chr, ids))

    params = type("Params", (), {"max_tokens": 4, "logprobs": None})()
    result = asyncio.run(executor.execute(PROMPT, LABEL, params, 128, Tokenizer(), Engine()))
    assert (result["reward"], result["scores"], result["extra_logs"]) == (1.0, 1.0, {"scorer_mark": 1.0})


def test_longer_lists_keep_their_order():
    result = rewards.reward_func([PROMPT + " 9\n", PROMPT + " 8\n"], [PROMPT] * 2, [LABEL] * 2)
    assert result["rewards"] == [1.0, 0.0]
