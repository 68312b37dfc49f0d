"""Reward for prompt sets of `qarl_openrlhf.data.reasoning_gym`: `--reward.remote_url qarl_openrlhf/rewards/reasoning_gym.py`.

The answer is the text inside the last <answer>...</answer> if the response has one, else its first line. The task's own scorer
judges it, and only its full mark counts: most scorers give part marks to any text that contains the right answer, and a
policy soon learns to list all numbers. "9 apples" for "9" is therefore 0 where the scorer is exact (chain_sum, products, gcd, ...);
some scorers (gsm_symbolic, spell_backward) take the answer out of any text, and their word counts.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from qarl_openrlhf.rewards.answers import response_of, strip_end

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


@lru_cache(maxsize=None)
def scorer(task: str):
    """The reasoning-gym data set whose `score_answer(answer, entry)` judges `task`."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=0, size=1)


def answer_of(response: str) -> str:
    """What the scorer gets to see of a response."""
    tagged = ANSWER.findall(response)
    if tagged:
        return tagged[-1].strip()
    return strip_end(response.split("\n", 1)[0])[0].strip()


def entry_of(label: str) -> dict | None:
    """What `qarl_openrlhf.data.reasoning_gym` wrote as a label: task, answer, metadata; None for any other label."""
    try:
        entry = json.loads(label)
    except (json.JSONDecodeError, TypeError):
        return None
    return entry if isinstance(entry, dict) and entry.keys() >= {"task", "answer"} else None


def mark(answer: str | None, label: str) -> float:
    """The scorer's mark, 0 to 1. ValueError for a label that `qarl_openrlhf.data.reasoning_gym` did not write."""
    if (entry := entry_of(label)) is None:
        raise ValueError(f"label {str(label)[:80]!r} is not of qarl_openrlhf.data.reasoning_gym; was --data.label_key label given?")
    task = scorer(entry["task"])
    try:
        return float(task.score_answer(answer or None, entry))
    except Exception:  # some scorers parse the answer without a guard: what they cannot parse is not solved
        return 0.0


def score(query: str, prompt: str, label: str) -> tuple[float, float]:
    """(reward, the scorer's mark). ValueError for a label that `qarl_openrlhf.data.reasoning_gym` did not write."""
    found = mark(answer_of(response_of(query, prompt)), label)
    return (1.0 if found >= 1.0 else 0.0), found


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict:
    """OpenRLHF's interface: it calls with lists of one and reads `rewards`, `scores` (both floats in [0, 1], what dynamic
    filtering compares) and `extra_logs` (numbers that it averages into the logs). Longer lists give lists."""
    results = [score(*row) for row in zip(queries, prompts, labels, strict=True)]
    rewards, marks = [r for r, _ in results], [m for _, m in results]
    if len(results) == 1:
        return {"rewards": rewards[0], "scores": rewards[0], "extra_logs": {"scorer_mark": marks[0]}}
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"scorer_mark": marks}}
