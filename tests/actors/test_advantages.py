"""Advantages of groups: the documented formula in float64, and none where all responses to a prompt got the same reward."""

from types import SimpleNamespace as N

import pytest
import torch

from qarl_openrlhf.actors.trainer import QarlExperienceMaker
from tests.actors.conftest import make_rollout


def advantages(rewards: torch.Tensor, estimator: str, **reward_flags) -> torch.Tensor:
    """[prompts, responses] of the advantage that each response's tokens get; rewards: float32 of the same shape, as rewards come."""
    prompts, group = rewards.shape
    maker = QarlExperienceMaker.__new__(QarlExperienceMaker)
    flags = N(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None)
    vars(flags).update(reward_flags)
    maker.args = N(
        rollout=N(n_samples_per_prompt=group, max_new_tokens=16),
        reward=flags,
        algo=N(advantage=N(estimator=estimator, gamma=1.0, no_std_norm=False)),
    )
    maker.strategy, maker.advantage_estimator, maker.kl_ctl = N(args=maker.args), estimator, N(value=0.0)
    samples = make_rollout(count=rewards.numel())
    for index, (sample, reward) in enumerate(zip(samples, rewards.flatten(), strict=True)):
        sample.index, sample.rewards, sample.kl = [index], reward.reshape(1), torch.zeros(sample.action_mask.shape)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)).tolist()  # as dynamic batches are dealt out
    found = torch.empty(len(samples))
    for sample in maker.compute_advantages_and_returns([samples[i] for i in order]):
        mine = sample.advantages[sample.action_mask.bool()]
        assert mine.dtype == torch.float32 and (mine == mine[0]).all()
        found[sample.index[0]] = mine[0]
    return found.reshape(prompts, group)


@pytest.mark.parametrize("prompts", [1, 4])
@pytest.mark.parametrize("group", [3, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("reward", [1.0, 0.1, 0.7, 0.9, -0.3])
def test_a_group_of_equal_rewards_pushes_nothing(reward, group, prompts):
    assert advantages(torch.full((prompts, group), reward), "group_norm").abs().max() < 1e-6


def test_a_penalty_that_all_get_pushes_nothing():
    cut_off = advantages(torch.full((2, 7), 0.7), "group_norm", stop_properly_penalty_coef=0.3)
    assert cut_off.abs().max() < 1e-6


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo"])
def test_advantages_are_the_formula(estimator):
    rewards = torch.tensor([[0.1, 0.7, 0.7, 0.2, 1.0, 0.1], [0.9] * 5 + [0.9001], [0.3] * 6])
    exact = rewards.double()
    mean = exact.mean(-1, keepdim=True)
    expected = {
        "group_norm": (exact - mean) / (exact.std(-1, keepdim=True) + 1e-9),
        "dr_grpo": exact - mean,
        "rloo": exact - (exact.sum(-1, keepdim=True) - exact) / 5,
    }[estimator]
    torch.testing.assert_close(advantages(rewards, estimator).double(), expected, rtol=1e-6, atol=1e-7)
