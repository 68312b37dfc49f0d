"""Every objective and weight against the float64 reference, loss and gradient, on generated batches."""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from objective_reference import RESPONSE_EDGES, TOKEN_EDGES, reference

from qarl_openrlhf.objectives import build_objective, list_objectives

PROFILE = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SPREADS = (0.0, 2e-4, 5e-4, 0.1, 0.5, 3.0)


@st.composite
def batches(draw):
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    rows = shape[0]
    unit = hnp.arrays("float32", shape, elements=st.floats(-2, 2, width=32))
    old = -torch.from_numpy(draw(unit)).abs()
    Delta = torch.from_numpy(draw(unit)) * draw(st.sampled_from(SPREADS))
    delta = torch.from_numpy(draw(unit)) * draw(st.sampled_from((0.0, 0.1, 1.0, 8.0)))
    some = st.sampled_from((-1.7, -0.4, 0.0, 0.3, 2.1))
    advantages = torch.tensor(draw(st.lists(some, min_size=rows, max_size=rows)))
    mask = torch.from_numpy(draw(hnp.arrays("bool", shape)))
    return old + Delta, old, old - delta, advantages, mask


def away_from_edges(log_probs, old, rollout, mask, cap, *more):
    """No ratio so near to an edge that float32 and float64 could fall on different sides."""
    lengths = mask.sum(-1).clamp(min=1)
    for x, token_edges, mean_edges, sum_edges in (
        ((log_probs - old).double(), TOKEN_EDGES, RESPONSE_EDGES, ()),
        ((old - rollout).double(), (cap, *more), (cap, 1 / cap, *more), more + (cap,)),
    ):
        x = torch.where(mask, x, 0.0)
        for values, edges in ((x, token_edges), (x.sum(-1) / lengths, mean_edges), (x.sum(-1), sum_edges)):
            for edge in edges:
                assume(bool(((values - math.log(edge)).abs() > 2e-6).all()))


def check(objective, name, batch, **reference_hp):
    log_probs, old, rollout, advantages, mask = batch
    leaf = log_probs.clone().requires_grad_()
    result = objective(leaf, old, rollout, advantages, mask)
    result.loss.backward()
    loss, gradient = reference(name, *batch, **reference_hp)
    torch.testing.assert_close(result.loss.double(), loss.double(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", list_objectives())
@PROFILE
@given(batch=batches())
def test_default_weight(name, batch):
    away_from_edges(batch[0], batch[1], batch[2], batch[4], 2.0)
    check(build_objective(name), name, batch)


@pytest.mark.parametrize("name", list_objectives())
@settings(PROFILE, max_examples=40)
@given(batch=batches(), kind=st.sampled_from(("none", "token", "seq", "mis")), cap=st.sampled_from((1.3, 5.0)))
def test_any_weight_with_any_surrogate(name, batch, kind, cap):
    away_from_edges(batch[0], batch[1], batch[2], batch[4], cap)
    check(build_objective(name, is_weight=kind, is_cap=cap), name, batch, kind=kind, cap=cap)


@pytest.mark.parametrize("statistic", ["geometric", "product", "worst_token"])
@PROFILE
@given(batch=batches(), band=st.sampled_from(((0.9, 1.1), (0.5, 4.0), (0.0, 1.5))))
def test_mis_statistics(statistic, batch, band):
    low, high = band
    away_from_edges(batch[0], batch[1], batch[2], batch[4], 2.0, *(x for x in band if x))
    objective = build_objective("mis_gspo", is_statistic=statistic, is_low=low, is_high=high)
    check(objective, "mis_gspo", batch, kind="mis", statistic=statistic, low=low, high=high)


def test_advantages_by_token_equal_advantages_by_response(batch):
    log_probs, old, rollout, advantages, mask = batch
    by_token = torch.where(mask > 0, advantages[:, None], torch.nan)
    for name in list_objectives():
        objective = build_objective(name)
        a = objective(log_probs, old, rollout, advantages, mask).loss
        b = objective(log_probs, old, rollout, by_token, mask).loss
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_gspo_equals_its_token_form(batch):
    """The weight ``token`` needs the token form; with w = 1 its loss and gradient are those of the response form."""
    log_probs, old, _, advantages, mask = batch
    for name in ("gspo", "tbpo"):
        results = []
        for weight in ("none", "token"):
            leaf = log_probs.clone().requires_grad_()
            result = build_objective(name, is_weight=weight)(leaf, old, old, advantages, mask)
            result.loss.backward()
            results.append((result.loss.detach(), leaf.grad))
            counted = result.sums["objective/in_band_frac"][1]
            assert counted == 7, "in-band fractions count responses in either form"
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_a_band_of_3e_4_survives_a_bf16_default_dtype(batch):
    log_probs, old, rollout, advantages, mask = batch
    expected = {name: build_objective(name)(*batch).loss for name in list_objectives()}
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = {name: build_objective(name)(*batch).loss for name in list_objectives()}
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
