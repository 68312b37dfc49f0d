"""Reward of the alignment measurement: the share of a response's letters that are an "e".

What is learned does not matter there, only that every group of responses has a gradient, so that the weights move.
"""

from qarl_openrlhf.rewards.answers import response_of


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_) -> dict:
    """OpenRLHF's interface, lists of one."""
    letters = [c for c in response_of(queries[0], prompts[0]).lower() if c.isalpha()]
    share = letters.count("e") / max(1, len(letters))
    return {"rewards": share, "scores": share, "extra_logs": {}}
