"""``--objective.drop``: one kept count an optimizer step, over micro-batches and ranks."""

import json
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qarl_openrlhf.actors.kept import global_kept, optimizer_steps
from qarl_openrlhf.actors.loss import ObjectiveLoss
from qarl_openrlhf.metrics.histograms import Histograms
from qarl_openrlhf.objectives import build_objective, list_objectives
from tests.ranks import Ranks


def count(rank: int, world: int, directory: str) -> None:
    dist.init_process_group("gloo")
    mine = pieces(batch(), 4)[rank::world]
    kept = global_kept(build_objective("tbpo", drop=True), mine, lambda b: b.current, accumulation=2)
    histograms = Histograms(torch.device("cpu"))
    for b in mine:
        histograms.add_update(b.current, b.action_log_probs, b.advantages, b.action_mask.bool())
    Path(directory, str(rank)).write_text(json.dumps([float(kept), int(histograms.over_ranks()["ratio"].sum())]))


def batch(rows=8, width=6):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, generator=g)
    return types.SimpleNamespace(
        action_log_probs=old,
        rollout_log_probs=old + 0.1 * torch.randn(rows, width, generator=g),
        current=old + 1e-3 * torch.randn(rows, width, generator=g),
        advantages=torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)[:, None].expand(rows, width),
        action_mask=torch.ones(rows, width),
    )


def pieces(whole, count):
    size = len(whole.action_mask) // count
    return [
        types.SimpleNamespace(**{name: value[i * size : (i + 1) * size] for name, value in vars(whole).items()}) for i in range(count)
    ]


def inputs(b):
    return (b.current, b.action_log_probs, b.rollout_log_probs, b.advantages, b.action_mask)


@pytest.mark.parametrize("name, drops_by_ratio", [("tbpo", True), ("mis_gspo", True), ("mis_grpo", False), ("grpo_tis", False), ("positive_grpo", False)])
def test_micro_batches_add_up_to_the_loss_of_the_whole(name, drops_by_ratio):
    given = {"is_low": 0.97, "is_high": 1.03} if name.startswith("mis") else {}
    objective, whole = build_objective(name, drop=True, **given), batch()
    assert objective.drops_by_ratio == drops_by_ratio
    expected = objective(*inputs(whole))
    kept = objective.count_kept(*inputs(whole))
    if name != "grpo_tis":
        assert 0 < kept < (48 if objective.mean == "tokens" else 8), "the case drops nothing, or all"
    parts = pieces(whole, 4)
    loss = ObjectiveLoss(objective)
    loss.global_kept = global_kept(objective, parts, lambda b: b.current, accumulation=4)
    # DeepSpeed divides every backward by the accumulation steps
    total = sum(loss(*(inputs(p)[i] for i in (0, 1, 3, 4, 2)))[0] / 4 for p in parts)
    assert float(total) == pytest.approx(float(expected.loss), rel=1e-5)


def test_optimizer_steps_are_cut_where_they_end():
    assert list(optimizer_steps(list("abcdef"), [False, True, True, False, False, True])) == [
        (0, ["a", "b"]),
        (2, ["c"]),
        (3, ["d", "e", "f"]),
    ]


def test_two_ranks_count_together(tmp_path):
    Ranks(count, 2, str(tmp_path)).wait(120)
    counts = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    whole = batch()
    kept = float(build_objective("tbpo", drop=True).count_kept(*inputs(whole))) / 2
    assert counts == [[kept, 48]] * 2  # 8 responses of 6 tokens in the histogram


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_learner_counts_each_optimizer_step_before_its_first_backward(make_learner, rollout, dynamic):
    """Three updates of several micro-batches: the count that each micro-batch's loss used is that of its whole update."""
    flags = {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 64, "rollout__max_tokens_per_gpu": 64} if dynamic else {}
    learner = make_learner("llama", objective__drop=True, objective__band_scale=20.0, rollout__batch_size=6, **flags)
    seen = []

    class Recording(ObjectiveLoss):
        def __call__(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, **rest):
            kept = self.objective.count_kept(log_probs, old_log_probs, rollout_log_probs, advantages, action_mask)
            seen.append((float(kept), float(self.global_kept)))
            return super().__call__(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, **rest)

    learner.actor_loss_fn = Recording(learner.actor_loss_fn.objective)
    learner.replay_buffer.clear()
    for item in rollout(count=24):
        learner.replay_buffer.append(item)
    learner.ppo_train(0.0)
    ends = learner.replay_buffer.dynamic_optimizer_step if dynamic else [0, 1] * 3
    accumulation = 1 if dynamic else 2  # DeepSpeed does not divide dynamic batches
    updates = [pairs for _, pairs in optimizer_steps(seen, ends)]
    assert len(updates) == 3 and all(len(pairs) > 1 for pairs in updates)
    for pairs in updates:
        assert {used for _, used in pairs} == {sum(kept for kept, _ in pairs) / accumulation}
    assert updates[0][0][1] == 8 / accumulation  # r = 1: all eight responses are kept
    assert updates[2][0][1] < 8 / accumulation, "the case drops nothing"


@pytest.mark.parametrize("name", list_objectives())
def test_an_objective_says_whether_the_current_policy_has_a_say_in_what_is_dropped(name):
    """Against what each response on its own leaves, with advantages of both signs, as the policy moves far and near."""
    objective = build_objective(name, drop=True)
    old, mask = torch.full((1, 4), -10.0), torch.ones(1, 4)
    moves = [sign * size for size in (0.0, 1e-4, 3e-4, 6e-4, 1e-2, 0.5, 9.0) for sign in (1, -1)]
    kept = {a: {float(objective.count_kept(old + move, old, old, torch.tensor([a]), mask)) for move in moves} for a in (1.0, 0.0, -1.0)}
    assert objective.drops_by_ratio == any(len(counts) > 1 for counts in kept.values())


@pytest.mark.parametrize("name, more", [("tbpo", 4), ("positive_grpo", 0), ("mis_grpo", 0)])
def test_one_more_forward_is_paid_for_a_drop_by_ratio_alone(make_learner, rollout, name, more):
    learner = make_learner("llama", objective__name=name, objective__drop=True, rollout__batch_size=6)
    learner.replay_buffer.clear()
    for item in rollout(count=24):
        learner.replay_buffer.append(item)
    forwards = []
    handle = learner.actor.register_forward_pre_hook(lambda *_: forwards.append(1))
    learner.ppo_train(0.0)
    handle.remove()
    assert len(forwards) == 6 + 6 + more  # old log-probs, training; of the second and third update, two micro-batches each
