"""Histograms, token records and the KL to the start policy, against their definitions on real objectives."""

import json
import math
import types

import numpy as np
import pytest
import torch

from qarl_openrlhf.metrics import diagnostics, histograms, records
from qarl_openrlhf.metrics.accumulate import Sums
from qarl_openrlhf.metrics.band_length import band_scale_line
from qarl_openrlhf.metrics.changed_codes import still_line
from qarl_openrlhf.metrics.start_policy import StartPolicy
from qarl_openrlhf.metrics.token_records import EDGE_TOKENS, TokenRecorder
from qarl_openrlhf.objectives import REGIONS, build_objective
from tests.tiny_models import make_tokenizer

CPU = torch.device("cpu")


def experience(rows=8, width=24, seed=0, drift=0.3):
    """An ``Experience``'s fields and current log-probs: 4 prompt tokens, responses of different lengths, the last one empty."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) >= 3
    lengths = torch.randint(5, width - 3, (rows, 1), generator=g)
    lengths[-1] = 0
    mask = mask & (torch.arange(width) < 3 + lengths)
    old = torch.where(mask, -7 * torch.rand(rows, width, generator=g) ** 2, math.nan)
    batch = types.SimpleNamespace(
        sequences=torch.randint(4, 90, (rows, width + 1), generator=g),
        attention_mask=torch.ones(rows, width + 1, dtype=torch.long),
        action_mask=mask.long(),
        action_log_probs=old,
        rollout_log_probs=old + 0.2 * torch.randn(rows, width, generator=g),
        advantages=torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, 1.0, -1.0, 1.0])[:rows, None].expand(rows, width),
        rewards=torch.arange(rows).float(),
    )
    return batch, old + drift * torch.randn(rows, width, generator=g)


def observed(objective=None, parts=None, **options):
    """Diagnostics after one rollout, whole or in the given row ranges."""
    batch, current = experience(**options)
    watch = diagnostics.Diagnostics(CPU, make_tokenizer())
    watch.begin(objective)
    sums = Sums()
    for rows in parts or [slice(None)]:
        piece = types.SimpleNamespace(**{name: value[rows] for name, value in vars(batch).items()})
        watch.sampled(piece, sums)
        states = None
        if objective:
            tensors = (current[rows], piece.action_log_probs, piece.rollout_log_probs, piece.advantages, piece.action_mask)
            states = objective(*tensors).tokens
        watch.updated(piece, current[rows], states, update=1)
    return batch, current, watch, watch.end()


def test_histograms_equal_numpy_counts():
    batch, current, watch, _ = observed(build_objective("grpo_tis"))
    mask = batch.action_mask.bool()
    old, now = batch.action_log_probs[mask].numpy(), current[mask].numpy()
    sign = batch.advantages[mask].sign().numpy()
    ends = [[-1.5, -0.5, 0.5, 1.5], [0, *histograms.PROB_EDGES, 1.01], [-np.inf, *histograms.LOG_RATIO_EDGES, np.inf]]
    expected, _ = np.histogramdd((sign, np.exp(old), now - old), bins=ends)
    assert (watch.histograms.counts["ratio"].numpy() == expected).all() and expected.sum() == mask.sum()
    weight = np.minimum(np.exp(old - batch.rollout_log_probs[mask].numpy()), 2)
    expected, _ = np.histogramdd((sign, np.exp(old), np.log(weight)), bins=ends)
    assert np.abs(watch.histograms.counts["weight"].numpy() - expected).sum() <= 2  # a cap's log may fall on either side
    rows = batch.action_mask.any(-1)
    assert watch.histograms.counts["seq_ratio"].sum() == rows.sum()
    assert watch.histograms.counts["old_current"].sum() == mask.sum()


@pytest.mark.parametrize("name", ["tbpo", "grpo_tis", "mis_gspo"])
def test_counts_do_not_depend_on_the_split(name):
    objective = build_objective(name)
    whole = observed(objective)[2].histograms.counts
    split = observed(objective, parts=[slice(0, 3), slice(3, 4), slice(4, 8)])[2].histograms.counts
    for key in whole:
        assert torch.equal(whole[key], split[key]), key


def test_regions_add_up_to_the_objectives_own():
    objective = build_objective("grpo_tis")
    batch, current, watch, metrics = observed(objective, drift=0.5)
    result = objective(current, batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask)
    region = watch.histograms.counts["region"]
    total = int(region.sum())
    for metric, sign, names in (
        ("objective/pos_clip_frac", 2, ("below", "above")),
        ("objective/neg_low_frac", 0, ("below",)),
        ("objective/neg_high_frac", 0, ("above",)),
    ):
        count = sum(int(region[sign, :, REGIONS.index(name)].sum()) for name in names)
        assert count / total == pytest.approx(float(result.metrics[metric])), metric
        assert count > 0
    assert 0 < metrics["objective/out_of_band_frac_neg_by_prob/0.001"] <= 1 and metrics["timing/diagnostics"] > 0


def test_rejected_responses_are_a_region_and_weigh_nothing():
    objective = build_objective("mis_gspo", is_low=0.999, is_high=1.001)
    batch, current, watch, _ = observed(objective)
    result = objective(current, batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask)
    states = result.tokens
    rejected = (states.region == REGIONS.index("rejected")) & states.mask
    assert rejected.any() and (states.weight[rejected] == 0).all()
    assert watch.histograms.counts["weight"][:, :, 0].sum() == rejected.sum()
    share = rejected.any(-1).sum() / batch.action_mask.any(-1).sum()
    assert float(share) == pytest.approx(float(result.metrics["is/reject_frac"]))


def test_records_hold_what_the_objective_made_of_each_token():
    objective = build_objective("grpo_tis")
    batch, current, watch, _ = observed(objective, drift=0.5)
    chosen = {record["why"]: record for record in watch.record["tokens"]}
    assert set(chosen) == {"most out of band, A > 0", "most out of band, A < 0", "as it comes"}
    push = objective.token_coefficients(
        current, batch.action_log_probs, batch.rollout_log_probs, batch.advantages, batch.action_mask
    )
    for why, record in chosen.items():
        row = int(record["reward"])
        mask = batch.action_mask[row].bool()
        assert record["ids"] == batch.sequences[row, 1:][mask].tolist()
        assert len(record["tokens"]) == len(record["region"]) == int(mask.sum()) and record["left_out"] == 0
        assert record["current"] == pytest.approx(current[row][mask].tolist(), abs=1e-4)
        assert record["push"] == pytest.approx((push[row][mask] / batch.advantages[row, 0].abs()).tolist(), abs=1e-3)
        # PPO's clip ends the push outside the band, but for A < 0 and a ratio above it
        for region, value in zip(record["region"], record["push"]):
            assert (REGIONS[region] == "inside" or (REGIONS[region], record["advantage"] < 0) == ("above", True)) == (value != 0)
        assert math.copysign(1, record["advantage"]) == (-1 if why.endswith("A < 0") else 1)
    assert json.dumps(watch.record)


def test_a_long_response_is_kept_without_its_middle():
    batch, current = experience(rows=1, width=3000)
    batch.action_mask[:, 3:] = 1
    batch.action_log_probs = batch.action_log_probs.nan_to_num(-1.0)
    batch.rollout_log_probs = batch.action_log_probs.clone()
    batch.rollout_log_probs[0, 10] = -math.inf  # must not become Infinity in JSON
    recorder = TokenRecorder()
    recorder.offer(batch, current.nan_to_num(-1.0), None, update=0)
    record = recorder.records()[0]
    assert record["left_out"] == 2997 - 2 * EDGE_TOKENS and len(record["ids"]) == len(record["old"]) == 2 * EDGE_TOKENS
    assert record["ids"][-1] == int(batch.sequences[0, -1]) and record["tokens"] is None
    assert "Infinity" not in json.dumps(record)


def test_records_are_bounded_and_a_resumed_run_appends(tmp_path):
    assert sum(map(records.step_is_recorded, range(1, 10_001))) == 100 + 90 + 90
    watch = observed(build_objective("tbpo"))[2]
    for step in (1, 2, 101):
        records.write_records(str(tmp_path), step, watch.record)
    rows = [json.loads(line) for line in (tmp_path / records.HISTOGRAMS).read_text().splitlines()]
    assert [row.get("step") for row in rows] == [None, 1, 2, 101] and set(rows[0]) == {"axes", "bins"}
    steps = [json.loads(line)["step"] for line in (tmp_path / records.TOKENS).read_text().splitlines()]
    assert set(steps) == {1, 2}
    assert (tmp_path / records.HISTOGRAMS).stat().st_size < 3 * 5000 + 3000


def single(batch, row):
    keep = batch.attention_mask[row].bool()
    return types.SimpleNamespace(
        sequences=batch.sequences[row][keep],
        attention_mask=batch.attention_mask[row][keep],
        action_mask=batch.action_mask[row],
        rollout_log_probs=batch.rollout_log_probs[row],
    )


def test_kl_to_the_start_policy(tmp_path):
    batch, _ = experience(rows=8)
    start = StartPolicy.of([single(batch, row) for row in range(8)], count=6, max_length=100)
    assert len(start.responses) == 6 and start.responses[0]["ids"] == batch.sequences[0].tolist()
    same = [[x if on else 0.0 for x, on in zip(r["log_probs"], r["mask"])] for r in start.responses]
    assert start.kl(same)["policy/kl_start"] == 0
    moved = [[x + 0.1 for x in row] for row in same]
    metrics = start.kl(moved)
    assert metrics["policy/kl_start"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-4)
    assert metrics["policy/kl_start_tokens"] == batch.action_mask[:6].sum()
    start.save(str(tmp_path))
    assert StartPolicy.load(str(tmp_path)).kl(moved) == metrics
    assert StartPolicy.load(str(tmp_path / "none")) is None


def test_kl_estimate_is_the_kl_of_two_known_policies():
    """Tokens drawn from p, scored by q: the mean of k3 is KL(p || q)."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(2, 12, generator=g)).log_softmax(-1)
    drawn = torch.multinomial(p.exp(), 200_000, replacement=True, generator=g)
    ids = [0] * (len(drawn) + 1)
    start = StartPolicy([{"ids": ids, "mask": [1] * len(drawn), "log_probs": p[drawn].tolist()}])
    assert start.kl([q[drawn].tolist()])["policy/kl_start"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=0.02)


def test_start_responses_fit_the_engine_and_have_log_probs():
    batch, _ = experience(rows=4)
    batch.rollout_log_probs[0, 4] = -math.inf
    singles = [single(batch, row) for row in range(4)]
    assert len(StartPolicy.of(singles, count=4, max_length=100).responses) == 2  # one -inf, one empty
    assert StartPolicy.of(singles, count=4, max_length=20).responses == []


def test_the_start_policy_is_not_chosen_by_length(monkeypatch):
    """Where the next response has no room, the next one that has would be a short one."""
    from qarl_openrlhf.metrics import start_policy

    singles = [
        types.SimpleNamespace(
            attention_mask=torch.ones(1, length), sequences=torch.ones(1, length), action_mask=torch.ones(1, length - 1),
            rollout_log_probs=torch.zeros(1, length - 1),
        )
        for length in (30, 200, 60, 40, 5, 5)
    ]  # fmt: skip
    monkeypatch.setattr(start_policy, "MAX_TOKENS", 100)
    kept = StartPolicy.of(singles, count=6, max_length=300).responses
    assert [len(response["ids"]) for response in kept] == [30, 60]  # 200 fits in no prefill at all


def test_no_share_of_mixed_groups_without_rewards():
    from qarl_openrlhf.actors.trainer import mixed_group_fraction

    def samples(*rewards):
        return [types.SimpleNamespace(rewards=None if r is None else torch.tensor([r])) for r in rewards]

    assert mixed_group_fraction(samples(1.0, 0.0, 1.0, 1.0), 2) == 0.5
    assert mixed_group_fraction(samples(None, None), 2) is None


def test_band_scale_line_compares_with_the_measured_length():
    samples = [types.SimpleNamespace(action_mask=torch.ones(1, n)) for n in (3, 5)]

    def args(name, **given):
        return types.SimpleNamespace(objective=types.SimpleNamespace(name=name, hyperparameters=given))

    line = band_scale_line(samples, args("tbpo", band_scale=52.0))
    assert "4.0 tokens" in line and "band_scale 52" in line and "is 64" in line
    assert "would be 64: raise it" in band_scale_line(samples, args("tbpo", band_scale=1.0))
    assert band_scale_line(samples, args("grpo_tis")) is None and band_scale_line(samples, args(None)) is None


def test_codes_that_stand_still_are_said_once():
    def args(scheme, optim="adam"):
        groups = dict(adam=types.SimpleNamespace(lr=1e-7), muon=types.SimpleNamespace(lr=1e-6), optim=optim)
        return types.SimpleNamespace(quant=types.SimpleNamespace(scheme=scheme), actor=types.SimpleNamespace(**groups))

    assert "raise --actor.adam.lr (now 1e-07)" in still_line(args("w4a16"), 3, 0.0)
    assert "raise --actor.muon.lr (now 1e-06)" in still_line(args("w8a8", "muon"), 3, 0.0)
    assert still_line(args("w4a16"), 2, 0.0) is None and still_line(args("w4a16"), 4, 0.0) is None
    assert still_line(args("w4a16"), 3, 1e-6) is None and still_line(args("w4a16"), 3, None) is None
    assert still_line(args("bf16"), 3, 0.0) is None
    assert still_line(args("w4a16"), 3, 0.0, mixed=0.0) is None and still_line(args("w4a16"), 3, 0.0, mixed=0.1)


def test_a_start_policy_that_shows_nothing_to_learn_is_said():
    from qarl_openrlhf.actors.trainer import start_policy_line

    def line(*rewards):
        args = types.SimpleNamespace(rollout=types.SimpleNamespace(n_samples_per_prompt=2), ckpt=types.SimpleNamespace(load_enable=False))
        samples = [types.SimpleNamespace(rewards=torch.tensor([reward]), prompts=[f"p{i // 2}"]) for i, reward in enumerate(rewards)]
        return start_policy_line(samples, args)

    assert line(0.0, 0.0, 1.0, 1.0).endswith("or look at the reward") and "mixed groups 0%: in none of them" in line(0.0, 0.0, 1.0, 1.0)
    assert line(0.0, 1.0, 1.0, 1.0).endswith("mixed groups 50%")
