"""A reward that a random model gets about half of the time: the response has an even number of characters."""


def reward_func(queries, prompts, labels, **_kwargs):
    score = float(len(queries[0]) % 2 == 0)
    return {"rewards": score, "scores": score, "extra_logs": {"only_right": 1.0} if score else {}}
