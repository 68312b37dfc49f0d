"""Reward for mathematics: `--reward.remote_url qarl_openrlhf/rewards/math.py`; 1 for the label's answer, else 0.

Options are environment variables, set in the shell of the driver (Ray's head inherits them; on a cluster that was started
before, set them there):

    QARL_MATH_ANSWER=any|boxed      boxed: only \\boxed{} counts; any (default): plain answers, too
    QARL_MATH_THINK=0|1             1: a response needs <think>...</think> before its answer
    QARL_MATH_OVERLONG=judge|zero   zero: a response that was cut off (it does not end with an end-of-sequence token) earns 0,
                                    whatever it contains. A penalty that grows with length: OpenRLHF's --reward.overlong_buffer_len
    QARL_MATH_WRONG=0               reward of a wrong answer, e.g. -1 (`scores`, which dynamic filtering reads, stay 0 and 1)
    QARL_MATH_TIMEOUT=5             seconds an answer may take; one that takes longer is wrong
    QARL_MATH_WORKERS=N             judging processes an engine (default: half of the cores, at most 8)

or arguments of a reward file of your own:

    from qarl_openrlhf.rewards.math import make_reward
    reward_func = make_reward(answer="boxed", wrong=-1.0)
"""

from __future__ import annotations

from qarl_openrlhf.rewards.answers import find_answer, response_of, strip_end, with_opened_thinking
from qarl_openrlhf.rewards.math_options import MathOptions


def score(response: str, label: str, options: MathOptions) -> tuple[bool, dict[str, float]]:
    """(right, extra logs: shares of responses without an answer, over the time limit, cut off). Blocks up to the limit."""
    if not str(label).strip():
        raise ValueError("the label is empty; was --data.label_key label given?")
    _, ended = strip_end(response)
    answer = find_answer(response, boxed_only=options.answer == "boxed")
    if (options.think and "</think>" not in response) or (options.overlong == "zero" and not ended):
        right, why = False, "format"
    else:
        right, why = options.pool().judge(answer, str(label))
    logs = {"math_no_answer": answer is None, "math_timeout": why in ("timeout", "crash"), "math_cut_off": not ended}
    return right, {name: float(value) for name, value in logs.items()}


def make_reward(**given):
    """OpenRLHF's `reward_func(queries, prompts, labels)`: it calls with lists of one, in a thread, and reads `rewards`, `scores`
    and `extra_logs` (numbers it averages into the logs). Longer lists give lists."""
    options = MathOptions.from_environment(**given)

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
        responses = [with_opened_thinking(p, response_of(q, p)) for q, p in zip(queries, prompts, strict=True)]
        results = [score(response, label, options) for response, label in zip(responses, labels, strict=True)]
        scores = [float(right) for right, _ in results]
        rewards = [1.0 if right else options.wrong for right, _ in results]
        if len(results) == 1:
            return {"rewards": rewards[0], "scores": scores[0], "extra_logs": results[0][1]}
        logs = {name: [each[name] for _, each in results] for name in results[0][1]} if results else {}
        return {"rewards": rewards, "scores": scores, "extra_logs": logs}

    return reward_func


reward_func = make_reward()
