"""Shapes, masks, extremes, NaN; and one batch split 8 ways gives the gradient of the whole."""

import math

import pytest
import torch
from objective_reference import make_batch

from qarl_openrlhf.objectives import (
    Objective,
    ObjectiveError,
    Surrogate,
    add_sums,
    band_warning,
    build_objective,
    list_objectives,
    metrics_from_sums,
    objective,
)

ALL = [(name, weight) for name in list_objectives() for weight in ("none", "token", "seq", "mis")]
TENSORS = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")


def run(objective, log_probs, old, rollout, advantages, mask, **normalisation):
    leaf = log_probs.clone().requires_grad_()
    result = objective(leaf, old, rollout, advantages, mask, **normalisation)
    assert result.loss.ndim == 0 and result.loss.dtype == torch.float32 and result.loss.requires_grad
    result.loss.backward()
    return result, leaf.grad


# ---- splits --------------------------------------------------------------------------------------------------------


SPLITS = [(8, 1, [2] * 8), (2, 4, [2] * 8), (1, 8, [2] * 8), (1, 4, [1, 7, 2, 6])]


@pytest.mark.parametrize(("ranks", "accumulate", "sizes"), SPLITS)
@pytest.mark.parametrize(("name", "weight"), ALL)
def test_a_split_batch_gives_the_gradient_of_the_whole(name, weight, ranks, accumulate, sizes):
    batch = make_batch(seed=3, rows=16)
    mask = batch[-1]
    objective = build_objective(name, is_weight=weight)
    tokens, responses = mask.sum(), mask.any(-1).sum()
    whole, expected = run(objective, *batch, dp_size=1, batch_num_tokens=tokens, global_batch_size=responses)

    gradients, sums = [], []
    for rows in torch.arange(16).split(sizes):
        width = max(int(mask[rows].sum(-1).max()), 1)  # each micro-batch is padded to its own longest response
        part = [x[rows] if x.ndim == 1 else x[rows, :width] for x in batch]
        counts = {"batch_num_tokens": tokens / accumulate, "global_batch_size": responses / accumulate}
        result, gradient = run(objective, *part, dp_size=ranks, **counts)
        # What DeepSpeed does: a micro-batch's loss over the accumulation steps, a gradient averaged over the ranks.
        gradient = torch.nn.functional.pad(gradient, (0, mask.shape[1] - width))
        gradients.append(gradient / accumulate / ranks)
        sums.append(result.sums)
    torch.testing.assert_close(torch.cat(gradients), expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(metrics_from_sums(add_sums(sums)), whole.metrics, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", list_objectives())
def test_drop_does_not_depend_on_the_split_either(name):
    batch = make_batch(seed=4, rows=16)
    objective = build_objective(name, is_weight="mis", is_low=0.9, is_high=1.15, drop=True)
    whole, expected = run(objective, *batch)
    kept = objective.count_kept(*batch)
    all_of_them = batch[-1].sum() if objective.mean == "tokens" else batch[-1].any(-1).sum()
    assert 0 < kept < all_of_them
    without, full = run(build_objective(name, is_weight="mis", is_low=0.9, is_high=1.15), *batch)
    torch.testing.assert_close(expected, full * all_of_them / kept)

    parts = [[x[i : i + 2] for x in batch] for i in range(0, 16, 2)]
    total = sum(objective.count_kept(*part) for part in parts)
    assert total == kept
    gradients = [run(objective, *part, dp_size=8, global_kept=total)[1] / 8 for part in parts]
    torch.testing.assert_close(torch.cat(gradients), expected, rtol=1e-5, atol=1e-8)
    for counts in ({"batch_num_tokens": 50, "global_batch_size": 14}, {"dp_size": 2}):
        with pytest.raises(ObjectiveError, match="global_kept"):
            objective(*parts[0], **counts)


def test_drop_takes_out_of_band_responses_from_the_denominator():
    """Two of four responses are above the band; GSPO still pushes on the one with A < 0; clipped tokens stay in."""
    log_ratio = torch.tensor([[0.0], [0.3], [0.3], [0.0]])
    args = (log_ratio, torch.zeros(4, 1), torch.zeros(4, 1), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4, 1))
    assert build_objective("tbpo").count_kept(*args) == 2
    assert build_objective("gspo").count_kept(*args) == 3
    assert build_objective("grpo_tis").count_kept(*args) == 4
    assert build_objective("positive_grpo").count_kept(*args) == 2
    _, gradient = run(build_objective("tbpo", drop=True), *args, batch_num_tokens=4, global_batch_size=4)
    torch.testing.assert_close(gradient, torch.tensor([[-0.5], [0.0], [0.0], [0.5]]))


def test_one_response_accumulated_over_four_micro_batches():
    """OpenRLHF's counts are divided by the accumulation steps, so they may be below 1."""
    x, ones = torch.zeros(1, 1), torch.ones(1, 1)
    for name in list_objectives():
        objective = build_objective(name)
        expected = 4 * objective(x + 0.01, x, x, ones, ones).loss
        torch.testing.assert_close(
            objective(x + 0.01, x, x, ones, ones, batch_num_tokens=0.25, global_batch_size=0.25).loss, expected
        )


# ---- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "weight"), ALL)
def test_masked_positions_and_empty_rows_count_nowhere(name, weight, batch):
    """Whatever stands there: NaN, inf; more padding on either side; more empty rows."""
    log_probs, old, rollout, advantages, mask = batch
    objective = build_objective(name, is_weight=weight)
    clean, expected = run(objective, *batch)
    for junk in (math.nan, -math.inf, math.inf, 1e30):
        dirty = [torch.where(mask > 0, x, junk) for x in (log_probs, old, rollout)]
        result, gradient = run(objective, *dirty, torch.where(mask.any(-1), advantages, junk), mask)
        torch.testing.assert_close((result.loss, gradient), (clean.loss, expected), rtol=0, atol=0)
        torch.testing.assert_close(result.metrics, clean.metrics, rtol=0, atol=0)
    padded = [torch.nn.functional.pad(x, (3, 5, 0, 2)) for x in (log_probs, old, rollout, mask)]
    result, gradient = run(objective, *padded[:3], torch.nn.functional.pad(advantages, (0, 2)), padded[3])
    torch.testing.assert_close(gradient[:-2, 3:-5], expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(result.metrics, clean.metrics, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", ["token", "response"])
def test_empty_rows_count_nowhere_even_if_the_surrogate_is_not_zero_there(level, batch):
    """A user's surrogate need not vanish where A = 0."""

    @objective(level=level, mean="responses", is_weight="none")
    def ratio_alone(units):
        return Surrogate(units.ratio)

    log_probs, old, rollout, advantages, mask = batch
    assert Objective(ratio_alone)(old, old, rollout, advantages, mask).loss == -1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_mask_dtypes(dtype, batch):
    expected = build_objective("tbpo")(*batch).loss
    assert build_objective("tbpo")(*batch[:4], batch[4].to(dtype)).loss == expected


# ---- extremes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "weight"), ALL)
def test_extremes_are_finite_and_attached(name, weight):
    objective = build_objective(name, is_weight=weight)
    for length in (1, 7):
        for Delta in (-1e4, -25.0, 0.0, 25.0, 1e4):
            for delta in (-1e4, 0.0, 1e4, math.inf):
                for A in (-1.0, 0.0, 1.0):
                    old = torch.full((2, length), -2e4)
                    args = (old + Delta, old, old - delta, torch.tensor([A, -A]), torch.ones(2, length))
                    result, gradient = run(objective, *args)
                    assert result.loss.isfinite() and gradient.isfinite().all(), (length, Delta, delta, A)
                    assert all(m.isfinite() for m in result.metrics.values())
                    if A == 0:
                        assert result.loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize("name", list_objectives())
def test_length_16384(name):
    """The band is seen: a mean of 16,384 token ratios 2e-4 above 1 is inside, 1e-3 above is outside."""
    objective = build_objective(name)
    old = torch.full((2, 16384), -0.7)
    log_probs = old + torch.tensor([[2e-4], [1e-3]])
    result, gradient = run(objective, log_probs, old, old, torch.tensor([1.0, -1.0]), torch.ones(2, 16384))
    assert result.loss.isfinite() and gradient.isfinite().all()
    assert (gradient[0] < 0).all()
    assert (gradient[1] == 0).all() if name in ("tbpo", "positive_grpo") else (gradient[1] > 0).all()


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("name", list_objectives())
def test_all_responses_rejected_gives_zero_on_the_graph(name, drop):
    """Also with nothing but padding, whatever the padding holds, and with a global count of 0."""
    old = torch.full((3, 4), -1.0)
    off = old - 5.0
    A = torch.tensor([1.0, -1.0, 0.5])
    objective = build_objective(name, is_weight="mis", drop=drop)
    nan, minus_inf = torch.full((3, 4), math.nan), torch.full((3, 4), -math.inf)
    ones, zeros = torch.ones(3, 4), torch.zeros(3, 4)
    counts = {"batch_num_tokens": 12, "global_batch_size": 3}
    none = {"batch_num_tokens": 0, "global_batch_size": 0}
    for args, count in [
        ((old + 0.01, old, off, A, ones), counts),
        ((old + 0.01, old, minus_inf, A, ones), counts),
        ((nan, nan, minus_inf, nan, zeros), none),
        ((minus_inf, old, nan, A, zeros), {}),
    ]:
        result, gradient = run(objective, *args, **count)
        assert result.loss == 0 and (gradient == 0).all()
        assert all(m.isfinite() for m in result.metrics.values())


def test_minus_inf_from_the_engine_is_a_log_ratio_of_20():
    zero, ones = torch.zeros(1, 1), torch.ones(1, 1)
    engine = torch.full((1, 1), -math.inf)
    objective = build_objective("grpo_tis", is_cap=1e9)
    weight = objective.token_coefficients(zero, zero, engine, torch.ones(1), ones)
    torch.testing.assert_close(weight, torch.full((1, 1), math.exp(20)))


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", range(4))
def test_nan_and_infinity_name_tensor_and_row(tensor, bad):
    args = [torch.zeros(4, 6) for _ in range(4)] + [torch.ones(4, 6)]
    args[tensor][2, 3] = bad
    objective = build_objective("tbpo")
    if TENSORS[tensor] == "rollout_log_probs" and bad == -math.inf:
        assert objective(*args).loss.isfinite()
        return
    with pytest.raises(ObjectiveError, match=rf"^{TENSORS[tensor]} is {bad} in row 2, token 3"):
        objective(*args)


def test_shapes_and_missing_tensors_are_named(batch):
    log_probs, old, rollout, advantages, mask = batch
    objective = build_objective("tbpo")
    with pytest.raises(ObjectiveError, match=r"rollout_log_probs must be a tensor, got NoneType: ask the engine"):
        objective(log_probs, old, None, advantages, mask)
    with pytest.raises(ObjectiveError, match=r"old_log_probs is \[8, 11\] but log_probs is \[8, 12\]"):
        objective(log_probs, old[:, 1:], rollout, advantages, mask)
    with pytest.raises(ObjectiveError, match=r"advantages is \[7\] but"):
        objective(log_probs, old, rollout, advantages[:7], mask)
    with pytest.raises(ObjectiveError, match=r"log_probs must be \[batch, tokens\], got \[12\]"):
        objective(log_probs[0], old[0], rollout[0], advantages[0], mask[0])


def test_band_warning_says_side_and_remedy():
    def sums(log_ratio, A):
        n = len(log_ratio)
        x = torch.tensor(log_ratio)[:, None]
        zero = torch.zeros(n, 1)
        return build_objective("tbpo")(x, zero, zero, torch.tensor(A), torch.ones(n, 1)).sums

    assert band_warning(sums([0.0, 0.0, 1e-2], [1.0, -1.0, 0.0])) is None
    assert band_warning(sums([0.0, 1e-2], [1.0, 1.0])) is None, "half is enough"
    positive = band_warning(sums([0.0, 1e-2, 1e-2], [1.0, 1.0, 1.0]))
    assert "33% of the 3 units with A > 0" in positive and "--objective.band_scale" in positive
    negative = band_warning(sums([-1e-2, 1e-2, 1e-2], [-1.0, -1.0, -1.0]))
    assert "A < 0" in negative and "2 above, 1 below" in negative
