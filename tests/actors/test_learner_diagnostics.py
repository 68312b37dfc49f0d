"""What the real learner hands out beside its metrics: histograms of every token, single responses, exact entropy."""

import pytest
import torch

from qarl_openrlhf.metrics.histograms import AXES, shape


def train(learner, experiences):
    learner.replay_buffer.clear()
    for experience in experiences:
        learner.replay_buffer.append(experience)
    return learner.ppo_train(0.0)


def dense(record, name):
    counts = torch.zeros(shape(name), dtype=torch.int64).flatten()
    counts[record["histograms"][name]["at"]] = torch.tensor(record["histograms"][name]["n"])
    return counts.view(shape(name))


def test_every_token_of_every_update_is_counted_once(make_learner, rollout):
    learner = make_learner("llama", objective__band_scale=20.0)
    items = rollout()
    tokens = sum(int(item.action_mask.sum()) for item in items)
    metrics = train(learner, items)
    record = learner.take_record()
    assert set(record["histograms"]) == set(AXES)
    for name in AXES:
        assert dense(record, name).sum() == (16 if name == "seq_ratio" else tokens), name
    # two updates: in the first one r = 1 exactly, so half of the responses are in the middle bin
    middle = shape("seq_ratio")[1] // 2
    assert dense(record, "seq_ratio")[:, middle].sum() >= 8
    assert len(record["tokens"]) == 3 and all(len(r["ids"]) == len(r["push"]) > 0 for r in record["tokens"])
    assert metrics["timing/diagnostics"] > 0 and any("out_of_band_frac" in name for name in metrics)
    assert learner.take_record() == {}, "a record is handed out twice"


def test_openrlhf_own_loss_is_watched_as_well(make_learner, rollout):
    learner = make_learner("llama", objective__name=None, quant__scheme="bf16")
    train(learner, rollout())
    record = learner.take_record()
    assert set(record["histograms"]) == set(AXES) - {"weight", "region"}
    assert {r["region"] for r in record["tokens"]} == {None} and len(record["tokens"]) == 3


@pytest.mark.parametrize("name", ["tbpo", None])
def test_entropy_is_that_of_the_whole_vocabulary_over_all_tokens(make_learner, rollout, name):
    """One update of micro-batches of different sizes: the mean over all tokens, not a mean of means."""
    learner = make_learner("llama", objective__name=name, actor__entropy_coef=0.0, train__batch_size=16)
    items = rollout()
    for item in items[:6]:
        item.action_mask[0, :-1] = 0  # uneven micro-batches
    learner.replay_buffer.clear()
    for item in items:
        learner.replay_buffer.append(item)
    total = count = 0
    for batch in learner._fixed_micro_batches():
        with torch.no_grad():
            _, output = learner.actor(
                batch.sequences, batch.action_mask, attention_mask=batch.attention_mask, return_output=True, return_entropy=True
            )
        mask = batch.action_mask.bool()
        total += float(output.entropy[:, -mask.shape[1] :][mask].sum())
        count += int(mask.sum())
    metrics = learner.ppo_train(0.0)
    assert metrics["policy/entropy"] == pytest.approx(total / count, rel=2e-3)  # another shuffle, other padding


def test_no_start_policy_without_an_engine(make_learner, rollout):
    learner = make_learner("llama")
    train(learner, rollout())
    assert learner.start_policy is None and "start_policy" not in learner.take_record()
