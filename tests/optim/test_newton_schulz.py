"""The batched iteration is torch.optim.Muon's, matrix by matrix."""

import pytest
import torch

from qarl_openrlhf.optim.exchange import plan
from qarl_openrlhf.optim.newton_schulz import newton_schulz, scale
from qarl_openrlhf.optim.shards import Stack


@pytest.mark.parametrize("shape", [(1, 32, 48), (5, 48, 32), (3, 64, 40), (2, 1, 16)])
def test_singular_values_come_to_about_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(shape), 5).float())
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
@pytest.mark.parametrize("kind", ["match_rms", "spectral"])
def test_one_step_of_torch_muon(shape, kind):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    before, weight.grad = weight.detach().clone(), torch.randn(shape)
    optimizer = torch.optim.Muon(
        [weight], lr=0.1, momentum=0.9, weight_decay=0.0, adjust_lr_fn={"match_rms": "match_rms_adamw", "spectral": "original"}[kind]
    )
    update = weight.grad.lerp(weight.grad * 0.1, 0.9)
    optimizer.step()
    # Together with another matrix, as experts are.
    mine = newton_schulz(torch.stack([torch.randn(shape), update]), 5)[1].float() * -0.1 * scale(kind, *shape)
    theirs = weight.detach() - before
    assert (mine - theirs).norm() < 1e-3 * theirs.norm()


def test_unknown_scales_are_refused():
    with pytest.raises(ValueError, match="use match_rms or spectral"):
        scale("rms", 2, 2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stack_is_cut_into_whole_matrices(rank):
    """Ten matrices of 6 elements, held by three ranks that meet in the middle of matrices."""
    edges = (0, 20, 45, 60)
    ranges = tuple(zip(edges, edges[1:], strict=False))
    whole = Stack("w", 10, 2, 3, ranges, offset=100)
    pieces = whole.pieces(18, rank)
    assert [piece.count for piece in pieces] == [3, 3, 3, 1]
    first, end = ranges[rank]
    held = []
    for start, piece in zip((0, 18, 36, 54), pieces, strict=True):
        assert sum(b - a for a, b in piece.ranges) == piece.numel
        a, b = piece.ranges[rank]
        held += range(start + a, start + b)
        if b > a:
            assert piece.offset - 100 == start + a - first
    assert held == list(range(first, end))


def test_costs_are_spread_over_the_ranks():
    stacks = tuple(Stack(str(n), 1, n, n, ((0, n * n), (n * n, n * n)), 0) for n in (8, 8, 8, 8, 16))
    (batch,) = plan(stacks, 2, 0)
    load = [sum(s.cost for s, o in zip(batch.stacks, batch.owners, strict=True) if o == r) for r in (0, 1)]
    assert max(load) == 16**3 and min(load) == 4 * 8**3
