"""Mismatch weights: values, no gradient, what they report, the effective sample size, the band options."""

import math

import pytest
import torch

from qarl_openrlhf.objectives import ObjectiveError, add_sums, build_objective, list_objectives, metrics_from_sums
from qarl_openrlhf.objectives.base import prepare
from qarl_openrlhf.objectives.weights import mismatch_weight


def weights_by_token(delta, **hp):
    """The weight each token gets: with r = 1 and A = 1 a token's coefficient is its w (by response: w / L)."""
    zero = torch.zeros_like(delta)
    ones = torch.ones_like(delta)
    return build_objective("grpo_tis", **hp).token_coefficients(zero, zero, -delta, torch.ones(len(delta)), ones)


def test_equal_policies_have_weight_one_exactly():
    for kind in ("none", "token", "seq", "mis"):
        assert (weights_by_token(torch.zeros(2, 3), is_weight=kind) == 1).all(), kind


def test_values():
    delta = torch.tensor([[0.1, -0.3, 1.5, 0.1], [-2.0, -1.0, -0.5, -0.1], [3.0, 2.0, 1.0, 0.5]])
    mean = delta.mean(-1, keepdim=True)
    expected = {
        "none": torch.ones(3, 4),
        "token": delta.exp().clamp(max=2.0),
        "seq": mean.clamp(-math.log(2), math.log(2)).exp().expand(3, 4),
        "mis": torch.tensor([[math.exp(0.35)], [math.exp(-0.9)], [0.0]]).expand(3, 4),
    }
    for kind, weight in expected.items():
        torch.testing.assert_close(weights_by_token(delta, is_weight=kind), weight)


@pytest.mark.parametrize(
    ("statistic", "kept"),
    [
        ("geometric", [True, True, False, True]),
        ("product", [True, False, False, True]),
        ("worst_token", [True, True, False, False]),
    ],
)
def test_mis_statistics_tell_responses_apart(statistic, kept):
    """Fine; a slight drift over all tokens; a heavy one; one token far off whose response is fine on the whole."""
    rows = [[0.0, 0.1, -0.1, 0.0], [0.15] * 4, [0.5] * 4, [1.0, -0.4, -0.3, -0.3]]
    weight = weights_by_token(torch.tensor(rows), is_weight="mis", is_statistic=statistic, is_low=0.7, is_high=1.4)
    assert (weight > 0).all(-1).tolist() == kept


def test_mis_weight_is_capped_below_a_higher_upper_end():
    weight = weights_by_token(torch.full((1, 2), math.log(3.0)), is_weight="mis", is_high=4.0)
    torch.testing.assert_close(weight, torch.full((1, 2), 2.0))


def test_worst_token_does_not_read_the_padding():
    """Padding would be a ratio of 1, below this band."""
    delta, mask = torch.full((1, 3), math.log(1.5)), torch.tensor([[1.0, 1.0, 0.0]])
    batch = prepare(torch.zeros(1, 3), torch.zeros(1, 3), -delta, torch.ones(1), mask)
    weight = mismatch_weight(batch, "mis", 2.0, statistic="worst_token", low=1.2, high=3.0)
    assert not weight.rejected.any()
    torch.testing.assert_close(weight.values, torch.tensor([1.5]))


def test_product_over_16384_tokens_does_not_overflow():
    delta = torch.full((2, 16384), 0.01)
    delta[1] = -0.01
    weight = weights_by_token(delta, is_weight="mis", is_statistic="product", is_low=0.5, is_high=2.0)
    assert (weight == 0).all()


def test_no_gradient_reaches_old_or_rollout_log_probs(batch):
    log_probs, old, rollout, advantages, mask = batch
    for name in list_objectives():
        for kind in ("none", "token", "seq", "mis"):
            leaves = [x.clone().requires_grad_() for x in (log_probs, old, rollout, advantages)]
            build_objective(name, is_weight=kind)(*leaves, mask).loss.backward()
            assert leaves[0].grad is not None and [x.grad for x in leaves[1:]] == [None] * 3


def test_report(batch):
    """Means over the weight's own units, and the effective sample size over all micro-batches together."""
    log_probs, old, rollout, advantages, mask = batch
    delta = (old - rollout)[mask.bool()]
    w = delta.exp().clamp(max=2)
    objective = build_objective("grpo_tis")
    parts = [objective(*(x[i : i + 2] for x in batch)).sums for i in range(0, 8, 2)]
    for metrics in (objective(*batch).metrics, metrics_from_sums(add_sums(parts))):
        torch.testing.assert_close(metrics["is/mean"], w.mean())
        torch.testing.assert_close(metrics["is/ess"], w.sum() ** 2 / (len(w) * (w**2).sum()))
        torch.testing.assert_close(metrics["is/clip_frac"], (delta > math.log(2)).float().mean())
        assert metrics["is/reject_frac"] == 0

    w = ((old - rollout) * mask).sum(-1)[mask.any(-1)] / mask.sum(-1)[mask.any(-1)]
    w = w.clamp(-math.log(2), math.log(2)).exp()
    by_response = build_objective("grpo_tis", is_weight="seq")(*batch).metrics  # tokens, weighted by response
    torch.testing.assert_close(by_response["is/mean"], w.mean())
    torch.testing.assert_close(by_response["is/ess"], w.sum() ** 2 / (len(w) * (w**2).sum()))

    rejecting = build_objective("tbpo", is_weight="mis", is_low=0.9, is_high=1.1)(*batch).metrics
    mean = ((old - rollout) * mask).sum(-1) / mask.sum(-1)
    rejected = ((mean.exp() < 0.9) | (mean.exp() > 1.1))[mask.any(-1)].float().mean()
    assert 0 < rejected < 1
    torch.testing.assert_close(rejecting["is/reject_frac"], rejected)
    torch.testing.assert_close(rejecting["is/clip_frac"], rejected)


def test_band_scale_widens_a_given_mis_band_of_the_geometric_mean_only():
    delta = torch.tensor([[0.003, 0.003]])
    zero, ones = torch.zeros(1, 2), torch.ones(1, 2)

    def kept(**hp):
        coefficient = build_objective("mis_grpo", **hp).token_coefficients(zero, zero, -delta, torch.ones(1), ones)
        return bool((coefficient != 0).all())

    assert not kept(is_low=0.999, is_high=1.001)
    assert kept(is_low=0.999, is_high=1.001, band_scale=4.0)
    assert not kept(is_low=0.999, is_high=1.001, band_scale=4.0, is_statistic="worst_token")
    # No lower end and the cap are not a band around 1: they stay.
    delta = torch.tensor([[-1.0, -1.0]])
    assert kept(band_scale=0.1)
    delta = torch.tensor([[0.8, 0.8]])
    assert not kept(band_scale=10.0)


def test_tbpo_weight_band():
    """Off by default; on, w is clipped to the band of its response's sign, and a rejected response stays rejected."""
    delta = torch.tensor([[0.5], [0.5], [-0.5], [-0.5]])
    A = torch.tensor([1.0, -1.0, 1.0, -1.0])
    zero, ones = torch.zeros(4, 1), torch.ones(4, 1)

    def weights(**hp):
        return build_objective("tbpo", **hp).token_coefficients(zero, zero, -delta, A, ones)[:, 0] * A

    torch.testing.assert_close(weights(), delta[:, 0].exp())
    clipped = torch.tensor([1 + 4e-4, 1 + 7e-4, math.exp(-0.5), 1 - 3e-4])
    torch.testing.assert_close(weights(weight_band=True), clipped, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights(weight_band=True, is_weight="token"), clipped, rtol=1e-6, atol=0)
    assert (weights(weight_band=True, is_weight="mis", is_high=1.2)[:2] == 0).all()


def test_the_paper_s_name_of_the_cap():
    assert build_objective("tbpo", seq_tis_imp_ratio_cap=3.0).hyperparameters["is_cap"] == 3.0
    assert build_objective("tbpo", seq_tis_imp_ratio_cap=3.0, is_cap=3.0).hyperparameters["is_cap"] == 3.0
    with pytest.raises(ObjectiveError, match="is_cap=4 and seq_tis_imp_ratio_cap=3"):
        build_objective("tbpo", seq_tis_imp_ratio_cap=3.0, is_cap=4.0)
