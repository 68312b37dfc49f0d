"""The reward for mathematics: its table of answers, its time limit, and its interface, as OpenRLHF calls it."""

import asyncio
import importlib.util
import os
import time

import psutil
import pytest

from qarl_openrlhf.rewards import math as rewards
from qarl_openrlhf.rewards.answers import find_answer
from qarl_openrlhf.rewards.math_options import MathOptions
from qarl_openrlhf.rewards.pool import JudgePool

from .math_answers import RESPONSES, RIGHT, WRONG

PROMPT = "What is it? \\boxed{} it.\n"


@pytest.fixture(scope="module")
def pool():
    pool = JudgePool(seconds=20, size=2)  # two busy cores: the table is about mathematics, not about time
    yield pool
    pool.close()


def test_the_table_of_answers(pool):
    assert len(RIGHT) + len(WRONG) >= 100 and len(set(RIGHT + WRONG)) == len(RIGHT + WRONG)
    verdicts = pool.judge_all([answer for answer, _ in RIGHT + WRONG], [label for _, label in RIGHT + WRONG])
    assert {why for _, why in verdicts} == {"ok"}
    assert [pair for pair, (right, _) in zip(RIGHT, verdicts, strict=False) if not right] == []
    assert [pair for pair, (right, _) in zip(WRONG, verdicts[len(RIGHT) :], strict=True) if right] == []


def test_answers_are_found_in_responses(pool):
    answers = [find_answer(response) for response, _, _ in RESPONSES]
    verdicts = pool.judge_all(answers, [label for _, label, _ in RESPONSES])
    assert [(r, a) for r, a, (right, _) in zip(RESPONSES, answers, verdicts, strict=True) if right != r[2]] == []


def test_boxed_only():
    assert find_answer("The answer is 4.", boxed_only=True) is None
    assert find_answer("\\boxed{4}", boxed_only=True) == "4"
    assert find_answer("\\boxed{" + "9" * 1001 + "}") is None


def test_thinking_that_the_chat_template_opened_is_scratch_work_until_it_is_closed():
    prompt = "What is 1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    reward = rewards.make_reward(timeout=20.0)
    for response, right in (("maybe \\boxed{2}, but wait", 0.0), ("so 2</think>\\boxed{2}", 1.0), ("it is 2</think>", 0.0)):
        result = reward([prompt + response], [prompt], ["2"])
        assert (result["rewards"], result["extra_logs"]["math_no_answer"]) == (right, 1.0 - right), response
    closed = prompt.replace("<think>\n", "<think>\n\n</think>\n\n")
    assert reward([closed + "\\boxed{2}"], [closed], ["2"])["rewards"] == 1.0


@pytest.mark.parametrize("filler", ["\n", " $", "\\boxed{", "<|im_end|>", "answer is ", "\\boxed{1} and ", "{", "<think>", "<answer>", "</answer>"])
def test_finding_an_answer_takes_linear_time(filler):
    """It runs in the engine's own process, where a slow expression would hold up all other requests."""
    text = "x" + filler * (60_000 // len(filler))
    start = time.process_time()
    find_answer(text), find_answer(text + "x")
    assert time.process_time() - start < 2


# What stalls, crashes or eats the memory of a judge: (answer, label). Each must be over in the limit, and the next one judged.
HOSTILE = [("9^{9^{9^{9}}}", "7"), ("\\sqrt{" * 130 + "2" + "}" * 130, "7"), ("(" * 900, "7"), ("\x00\n{\"a\"", "7")]
MORE_HOSTILE = [("(((10!)!)!)", "10^{10^{9}}"), ("\\int_0^{10^{9}} x^{x^{x}} dx", "7"), ("1" * 990, "7"), ("{" * 500, "7"), ("7", "9^{9^{9^{9}}}")]


def survive(pairs) -> list[str]:
    pool = JudgePool(seconds=1.5, size=1)
    try:
        outcomes = []
        for answer, label in pairs:
            right, why = pool.judge("2", "2.0")
            while why == "timeout":  # the machine is busy, not the answer hard
                right, why = pool.judge("2", "2.0")
            assert (right, why) == (True, "ok")
            start = time.monotonic()
            right, why = pool.judge(answer, label)  # the process is there: only judging is timed
            assert not right and time.monotonic() - start < 3, answer[:20]
            outcomes.append(why)
        return outcomes
    finally:
        pool.close()


def test_hostile_answers_cost_their_process_not_the_run():
    assert {"timeout", "crash"} & set(survive(HOSTILE))


@pytest.mark.slow
def test_more_hostile_answers():
    survive(MORE_HOSTILE)


def test_a_judge_that_was_killed_is_replaced():
    pool = JudgePool(seconds=20, size=1)
    pool.judge("1", "1.0")
    child = pool.idle[0].child
    child.kill()
    child.wait()
    assert pool.judge("1/2", "0.5") == (True, "ok")
    last = psutil.Process(pool.idle[0].child.pid)
    pool.close()
    assert not last.is_running()


def test_options(monkeypatch):
    monkeypatch.setenv("QARL_MATH_ANSWER", "boxed")
    monkeypatch.setenv("QARL_MATH_WRONG", "-1")
    options = MathOptions.from_environment(timeout=20.0)
    assert (options.answer, options.wrong, options.timeout) == ("boxed", -1.0, 20.0)
    reward = rewards.make_reward(timeout=20.0, workers=2)
    result = reward([PROMPT + "answer: 4", PROMPT + "\\boxed{4}</s>"], [PROMPT] * 2, ["4", "4"])
    assert result["rewards"] == [-1.0, 1.0] and result["scores"] == [0.0, 1.0]
    assert result["extra_logs"] == {"math_no_answer": [1.0, 0.0], "math_timeout": [0.0, 0.0], "math_cut_off": [1.0, 0.0]}
    for name, value in [("ANSWER", "box"), ("THINK", "yes"), ("TIMEOUT", "soon"), ("WORKERS", "0"), ("OVERLONG", "cut")]:
        with pytest.raises(ValueError, match=f"QARL_MATH_{name}"):
            MathOptions.from_environment({f"QARL_MATH_{name}": value})


def test_format_and_cut_off_responses(monkeypatch):
    options = dict(timeout=20.0, workers=2)

    def earned(response, **more):
        return rewards.make_reward(**options, **more)([PROMPT + response], [PROMPT], ["4"])["rewards"]

    assert earned("\\boxed{4}", overlong="zero") == 0.0
    assert earned("\\boxed{4}<|im_end|>\n", overlong="zero") == 1.0
    assert earned("\\boxed{4}", think=True) == 0.0
    assert earned("<think>2+2</think> \\boxed{4}", think=True) == 1.0
    with pytest.raises(ValueError, match="--data.label_key"):
        rewards.make_reward(**options)([PROMPT], [PROMPT], [""])


def test_as_openrlhf_loads_and_calls_it(monkeypatch):
    """From its file, in a thread of an event loop that goes on running while an answer is judged."""
    monkeypatch.setenv("QARL_MATH_TIMEOUT", "3")
    spec = importlib.util.spec_from_file_location("reward_func", rewards.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        ticking = asyncio.create_task(tick())
        jobs = [asyncio.to_thread(module.reward_func, [PROMPT + r], [PROMPT], ["7"]) for r in ("\\boxed{9^{9^{9^{9}}}!}", "\\boxed{7}")]
        results = await asyncio.gather(*jobs)
        ticking.cancel()
        return results, ticks

    results, ticks = asyncio.run(run())
    assert [r["rewards"] for r in results] == [0.0, 1.0]
    assert ticks > 5 and os.path.basename(rewards.__file__) == "math.py"
