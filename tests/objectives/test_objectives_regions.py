"""The gradient by region of r and sign of A; Table 6 of the paper; nothing clipped while r = 1."""

import math

import pytest
import torch

from qarl_openrlhf.objectives import build_objective, list_objectives

EPS = 1e-5  # just off an edge


def gate(r, tau):
    s = 1 / (1 + math.exp(-tau * (r - 1)))
    return 4 * s * (1 - s) * r


# (objective, r, A, d(objective)/d(log r)) with w = 1. Inside a band it is r A.
TABLE = [
    # PPO's clip: for A > 0 stopped above 1.2, for A < 0 below 0.8, and above 1.2 it pushes on without end.
    *[(n, 0.3, +2.0, 0.6) for n in ("grpo_tis", "onpolicy_grpo", "positive_grpo", "dual_clip", "dapo", "mis_grpo")],
    *[(n, 1.1, +2.0, 2.2) for n in ("grpo_tis", "onpolicy_grpo", "positive_grpo", "dual_clip", "dapo", "mis_grpo")],
    *[(n, 1.2 - EPS, +1.0, 1.2) for n in ("grpo_tis", "positive_grpo", "dual_clip")],
    *[(n, 1.2 + EPS, +1.0, 0.0) for n in ("grpo_tis", "positive_grpo", "dual_clip")],
    *[(n, 5.0, +2.0, 0.0) for n in ("grpo_tis", "onpolicy_grpo", "positive_grpo", "dual_clip", "dapo", "mis_grpo")],
    *[(n, 0.8 - EPS, -1.0, 0.0) for n in ("grpo_tis", "onpolicy_grpo", "dual_clip", "dapo", "mis_grpo")],
    *[(n, 0.8 + EPS, -1.0, -0.8) for n in ("grpo_tis", "onpolicy_grpo", "dual_clip", "dapo", "mis_grpo")],
    *[(n, 2.0, -1.0, -2.0) for n in ("grpo_tis", "onpolicy_grpo", "dual_clip", "dapo", "mis_grpo")],
    *[(n, 50.0, -1.0, -50.0) for n in ("grpo_tis", "onpolicy_grpo", "dapo", "mis_grpo")],
    ("dual_clip", 3 - EPS, -1.0, -3.0),
    ("dual_clip", 3 + EPS, -1.0, 0.0),
    ("dual_clip", 50.0, -1.0, 0.0),
    ("positive_grpo", 1.0, -1.0, 0.0),
    ("positive_grpo", 50.0, -1.0, 0.0),
    ("dapo", 1.25, +1.0, 1.25),
    ("dapo", 1.28 + EPS, +1.0, 0.0),
    # CISPO: no token loses its gradient.
    *[("cispo", r, A, min(r, 1.28) * A) for r in (0.1, 1.0, 1.2, 1.5, 9.0) for A in (1.0, -1.0)],
    # SAPO: a soft gate, another temperature for A < 0.
    *[("sapo", r, +1.0, gate(r, 1.0)) for r in (0.2, 1.0, 2.0, 6.0)],
    *[("sapo", r, -1.0, -gate(r, 1.05)) for r in (0.2, 1.0, 2.0, 6.0)],
    # GSPO: PPO's clip on the response, so above the band it pushes on for A < 0.
    *[(n, r, +1.0, r) for n in ("gspo", "mis_gspo") for r in (0.5, 0.999, 1.00039)],
    *[(n, r, +1.0, 0.0) for n in ("gspo", "mis_gspo") for r in (1.00041, 1.5)],
    *[(n, r, -1.0, 0.0) for n in ("gspo", "mis_gspo") for r in (0.5, 0.99969)],
    *[(n, r, -1.0, -r) for n in ("gspo", "mis_gspo") for r in (0.99971, 1.00041, 1.00071, 1.5)],
    # TBPO: two-sided for A < 0, exactly zero above the band, too.
    *[("tbpo", r, +1.0, r) for r in (0.5, 0.999, 1.00039)],
    *[("tbpo", r, +1.0, 0.0) for r in (1.00041, 1.5)],
    *[("tbpo", r, -1.0, 0.0) for r in (0.5, 0.99969, 1.00071, 1.5, 50.0)],
    *[("tbpo", r, -1.0, -r) for r in (0.99971, 1.0, 1.00041, 1.00069)],
    *[(n, r, 0.0, 0.0) for n in list_objectives() for r in (0.1, 1.0, 9.0)],
]


@pytest.mark.parametrize(("name", "r", "A", "expected"), TABLE)
def test_gradient_by_region(name, r, A, expected):
    length = 5
    old = torch.full((1, length), -1.0)
    log_probs = (old.double() + math.log(r)).float()
    # The gradient of a mean over 5 equal tokens, 5 times over: by token for one, by response for the other.
    gradient = build_objective(name).token_coefficients(log_probs, old, old, torch.tensor([A]), torch.ones(1, length))
    if build_objective(name).mean == "responses":
        gradient = gradient * length
    if expected == 0:
        assert (gradient == 0).all()
    torch.testing.assert_close(gradient, torch.full_like(gradient, expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["gspo", "tbpo"])
@pytest.mark.parametrize("scale", [0.5, 10.0])
def test_band_scale_multiplies_every_sequence_band(name, scale):
    objective = build_objective(name, band_scale=scale)
    edges = {"gspo": [(1, 4e-4), (-1, -3e-4)], "tbpo": [(1, 4e-4), (-1, -3e-4), (-1, 7e-4)]}[name]
    old = torch.zeros(1, 1)
    for A, edge in edges:
        for width, inside in ((0.98, True), (1.02, False)):
            log_probs = torch.tensor([[math.log1p(edge * scale * width)]])
            coefficient = objective.token_coefficients(log_probs, old, old, torch.tensor([float(A)]), torch.ones(1, 1))
            assert (coefficient != 0).item() is inside, (A, edge, width)


def test_regions_are_reported_as_fractions_that_add_up():
    """One response a region: TBPO cuts both sides of A < 0; GSPO has a report of the side where it pushes on."""
    log_ratio = torch.tensor([0.0, 1e-3, 0.0, -1e-3, 1e-3, 0.0, 0.0, 0.0])[:, None].expand(8, 3)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 1.0, 1.0])
    old = torch.zeros(8, 3)
    mask = torch.ones(8, 3)
    mask[6:] = 0
    for name in ("tbpo", "gspo"):
        metrics = build_objective(name)(log_ratio, old, old, advantages, mask).metrics
        expected = {"in_band_frac": 3 / 6, "pos_clip_frac": 1 / 6, "neg_low_frac": 1 / 6, "neg_high_frac": 1 / 6}
        expected |= {"in_band_frac_pos": 1 / 2, "in_band_frac_neg": 1 / 3}
        for key, value in expected.items():
            assert metrics[f"objective/{key}"].item() == pytest.approx(value), (name, key)
    ratios = 3 + 2 * math.exp(1e-3) + math.exp(-1e-3)
    assert metrics["objective/ratio_mean"].item() == pytest.approx(ratios / 6, rel=1e-6)
    assert metrics["objective/ppo_kl"].item() == pytest.approx(-1e-3 / 6)


@pytest.mark.parametrize("weight", ["none", "token", "seq", "mis"])
@pytest.mark.parametrize("name", list_objectives())
def test_nothing_is_clipped_on_the_first_mini_batch(name, weight, batch):
    _, old, rollout, advantages, mask = batch
    result = build_objective(name, is_weight=weight)(old.clone().requires_grad_(), old, rollout, advantages, mask)
    metrics = result.metrics
    assert metrics["objective/in_band_frac"] == 1 and metrics["objective/ratio_mean"] == 1
    assert metrics["objective/in_band_frac_pos"] == 1 and metrics["objective/in_band_frac_neg"] == 1
    for key in ("pos_clip_frac", "neg_low_frac", "neg_high_frac", "ppo_kl"):
        assert metrics[f"objective/{key}"] == 0, key
    assert all(m.ndim == 0 and not m.requires_grad for m in metrics.values())


def test_table_6_garbled_cluster_and_exploration_token():
    """The paper's Table 6: what token clipping gets wrong and a sequence band gets right.

    Row 0, A > 0: one exploration token becomes 1.5 times as likely, the rest stands still. Row 1, A < 0: a cluster of
    40 garbled tokens, each 1.15 times as likely, under every token's clip.
    """
    length, token, cluster = 2048, 100, slice(500, 540)
    old = torch.full((2, length), -1.0)
    log_ratio = torch.zeros(2, length)
    log_ratio[0, token] = math.log(1.5)
    log_ratio[1, cluster] = math.log(1.15)
    args = (old + log_ratio, old, old, torch.tensor([1.0, -1.0]), torch.ones(2, length))

    grpo = build_objective("grpo_tis").token_coefficients(*args)
    assert grpo[0, token] == 0, "GRPO clips the exploration token"
    assert (grpo[1, cluster] < -1).all(), "and pushes on every garbled one, harder than on the rest"
    tbpo = build_objective("tbpo").token_coefficients(*args)
    assert tbpo[0, token] > 0, "TBPO keeps the exploration token"
    assert (tbpo[1] == 0).all(), "and drops the garbled response whole"
    gspo = build_objective("gspo").token_coefficients(*args)
    assert (gspo[1, cluster] < 0).all(), "GSPO has no upper side for A < 0"
