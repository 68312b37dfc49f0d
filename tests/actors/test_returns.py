"""Returns of a batch are the bits of OpenRLHF's loop over its tokens."""

import pytest
import torch

from qarl_openrlhf.actors.trainer import QarlExperienceMaker


@pytest.mark.parametrize("dense", [False, True])  # a reward at the end; and a KL term in every token's
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("tokens", [1, 37, 1000])
def test_returns(dense, gamma, tokens):
    torch.manual_seed(tokens)
    mask = (torch.arange(tokens)[None] < torch.randint(1, tokens + 1, (6, 1))).long()
    rewards = torch.randn(6, tokens) * 0.1 if dense else torch.zeros(6, tokens)
    rewards[torch.arange(6), mask.sum(1) - 1] += torch.randn(6)
    openrlhfs = QarlExperienceMaker.__base__
    makers = [maker.__new__(maker) for maker in (QarlExperienceMaker, openrlhfs)]
    ours, theirs = (maker.get_cumulative_returns(rewards.clone(), mask, gamma) for maker in makers)
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype == torch.float32 and ours.is_contiguous()
    assert torch.equal(makers[0].get_cumulative_returns(rewards, None, gamma), makers[1].get_cumulative_returns(rewards, None, gamma))
