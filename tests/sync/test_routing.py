"""The share of chosen experts that learner and engine have in common."""

import torch

from qarl_openrlhf.sync.routing import topk_agreement


def test_agreement_counts_experts_whatever_their_order():
    mine = {1: torch.tensor([[0, 3], [2, 1], [5, 4]])}
    theirs = torch.zeros(4, 2, 2, dtype=torch.uint8)  # a dense layer 0, and one token more
    theirs[:3, 1] = torch.tensor([[3, 0], [2, 7], [6, 7]])
    assert topk_agreement(mine, theirs) == 0.5
    mine[3] = mine[1]
    both = torch.cat([theirs, theirs], 1)
    assert topk_agreement(mine, both) == 0.5
