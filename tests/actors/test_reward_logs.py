"""A reward's ``extra_logs``: a name need not be in every response, and its mean is over those that have it."""

import math
from types import SimpleNamespace as N

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import make_experience_batch, split_experience_batch

from qarl_openrlhf.actors.samples import QarlSamplesGenerator, mean_logs
from qarl_openrlhf.actors.trainer import QarlExperienceMaker


def sampled(*logs: dict | None) -> list:
    """Responses as the generator makes them of what engines answer."""
    generator = object.__new__(QarlSamplesGenerator)
    common = {"observation_tokens": [5, 6, 7, 8], "action_ranges": [(2, 4)], "rollout_log_probs": [0.0, 0.0, -1.0, -1.0]}
    common |= {"reward": 1.0, "scores": 1.0, "truncated": False, "prompt": "p", "label": "l"}
    return [generator._process_response_into_experience(common | {"extra_logs": log, "slot": (i, 0)}) for i, log in enumerate(logs)]


def through_openrlhf(samples: list) -> None:
    """The way of a rollout's responses to the learner: batched, split, batched again."""
    maker = object.__new__(QarlExperienceMaker)
    maker.args = N(train=N(dynamic_batch_enable=False), rollout=N(micro_batch_size=2))
    maker.tokenizer = N(pad_token_id=0)
    items = [item for batch in maker.split_rollout_samples(samples) for item in split_experience_batch(batch)]
    assert len(make_experience_batch(items).info["reward"]) == len(samples)


@pytest.mark.parametrize("logs, means", [
    ([{"only_right": 2.0, "long": 1.0}, {"long": 0.0}, {"only_right": 4.0, "long": 0.0}, {"long": 0.0}], {"only_right": 3.0, "long": 0.25}),
    ([{}, {"late": 1.0}], {"late": 1.0}),
    ([{"early": 1.0}, {}, None], {"early": 1.0}),
    ([{"a": torch.tensor([2.0])}, {"b": 3}], {"a": 2.0, "b": 3.0}),  # a tensor: an agent's
    ([{}, None], {}),
])  # fmt: skip
def test_a_name_may_be_missing(logs, means):
    samples = sampled(*logs)
    through_openrlhf(samples)
    assert mean_logs(samples) == means


def test_a_nan_that_a_reward_gives_is_not_hidden():
    assert math.isnan(mean_logs(sampled({"x": float("nan")}, {"x": 1.0}, {}))["x"])


def test_a_name_of_openrlhfs_changes_nothing_that_is_trained_on():
    [sample] = sampled({"reward": 7.0})
    assert sample.info["reward"].item() == 1.0 and mean_logs([sample]) == {"reward": 7.0}
