"""The learner's step under real DeepSpeed: r = 1 bitwise, one quantization a step, whole optimizer steps only."""

from types import SimpleNamespace

import pytest
import torch

from qarl_openrlhf.actors.loss import ObjectiveLoss
from qarl_openrlhf.objectives import build_objective, list_objectives
from qarl_openrlhf.planning.reduce_bucket import reduce_bucket

BUDGET = {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 64, "rollout__max_tokens_per_gpu": 64}


class RecordingLoss(ObjectiveLoss):
    """Notes max |log pi_current - log pi_old| of every training forward."""

    def __init__(self, objective):
        super().__init__(objective)
        self.largest_log_ratio = []

    def __call__(self, log_probs, old_log_probs, *args, **kwargs):
        self.largest_log_ratio.append(float((log_probs.detach() - old_log_probs).abs().max()))
        return super().__call__(log_probs, old_log_probs, *args, **kwargs)


def fill(learner, experiences):
    learner.replay_buffer.clear()
    for experience in experiences:
        learner.replay_buffer.append(experience)


@pytest.mark.parametrize("zero, scheme", [(1, "w4a16:g32"), (2, "w8a8"), (3, "w4a16:g32"), (2, "bf16"), (2, "w4a16:g32:rollout")])
def test_log_ratio_is_exactly_zero_before_the_first_update(make_learner, rollout, zero, scheme):
    learner = make_learner("qwen2", ds__zero_stage=zero, quant__scheme=scheme, actor__gradient_checkpointing_enable=zero == 3)
    fill(learner, rollout())
    learner.actor_loss_fn = recording = RecordingLoss(learner.actor_loss_fn.objective)
    metrics = learner.ppo_train(0.0)
    seen = recording.largest_log_ratio
    assert len(seen) == 4  # 16 samples in micro-batches of 4, 2 micro-batches an update
    assert seen[0] == seen[1] == 0, "another log-prob in the training pass than in the pass before it"
    assert max(seen[2:]) > 0, "the first update changed nothing"
    assert metrics["objective/in_band_frac_by_update/0"] == 1.0
    assert metrics["policy/updates"] == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_log_ratio_is_exactly_zero_in_packed_batches(make_learner, rollout, dynamic):
    """Packed without flash-attn: log r = 0 before the first update, and the padded run's log-probs."""
    experiences = rollout()
    padded = make_learner("qwen2")
    fill(padded, experiences)
    batch = padded._fixed_micro_batches()[0]
    flags = {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 64, "rollout__max_tokens_per_gpu": 64} if dynamic else {}
    learner = make_learner("qwen2", ds__packing_samples=True, **flags)
    with torch.no_grad():
        mine, theirs = (
            one.actor(batch.sequences, batch.action_mask, attention_mask=batch.attention_mask) for one in (padded, learner)
        )
    assert (mine - theirs).abs().max() < 0.05  # BF16, another order of additions
    fill(learner, rollout())
    learner.actor_loss_fn = recording = RecordingLoss(learner.actor_loss_fn.objective)
    metrics = learner.ppo_train(0.0)
    first = recording.largest_log_ratio[: len(recording.largest_log_ratio) // 2]
    assert set(first) == {0.0}
    assert max(recording.largest_log_ratio) > 0
    assert metrics["policy/updates"] == 2


def test_no_objective_clips_on_the_first_mini_batch(make_learner, rollout):
    learner = make_learner("llama", train__batch_size=16)  # one optimizer step a rollout
    for updates, name in enumerate(list_objectives(), start=1):
        learner.actor_loss_fn = ObjectiveLoss(build_objective(name))
        fill(learner, rollout(seed=updates))
        metrics = learner.ppo_train(0.0)
        assert metrics["policy/updates"] == updates
        for clip in ("objective/pos_clip_frac", "objective/neg_low_frac", "objective/neg_high_frac"):
            assert metrics.get(clip, 0.0) == 0.0, (name, clip)
        assert metrics["objective/in_band_frac"] == 1.0 and metrics["objective/ppo_kl"] == 0.0, name


def test_kernel_calls_are_counted_and_the_choices_told_once(monkeypatch):
    from qarl_openrlhf.kernels import dispatch
    from qarl_openrlhf.metrics.kernels import KernelReport

    calls = {"quantize_int4": 14}
    monkeypatch.setattr(dispatch, "kernel_calls", lambda: dict(calls))
    monkeypatch.setattr(dispatch, "kernel_choices", lambda: "w4a16 M 64: library")
    report = KernelReport("auto")
    assert report.metrics() == {"kernels/quantize_int4_calls": 14.0, "kernels/choices": "w4a16 M 64: library"}
    calls["quantize_int4"] = 42
    assert report.metrics() == {"kernels/quantize_int4_calls": 28.0}
    assert "kernels/choices" not in KernelReport("triton").metrics()


@pytest.mark.parametrize("cache", ["packed", "dequant", "none"])
def test_weights_are_quantized_once_an_optimizer_step(make_learner, rollout, cache):
    learner = make_learner("llama", quant__cache=cache)
    stats, layers = learner.actor.quant_cache.stats, 14
    fill(learner, rollout())
    before = stats.quantize_calls
    learner.ppo_train(0.0)
    for _ in learner.publishing.tensors():
        pass
    made = stats.quantize_calls - before
    if cache == "none":
        assert made == layers * (4 + 4 + 1)  # four old-log-prob passes, four training passes, the publish
    else:
        # the start policy, after the first update, after the second (made by the publish)
        assert made == 3 * layers
        fill(learner, rollout(seed=1))
        learner.ppo_train(0.0)
        assert stats.quantize_calls - before == 4 * layers, "the publish's weights were not reused by the next rollout's first pass"


def test_cache_modes_publish_the_same_bytes(make_learner, rollout):
    published = []
    for cache in ("packed", "dequant", "none"):
        learner = make_learner("qwen3", quant__cache=cache)
        fill(learner, rollout())
        torch.manual_seed(7)
        learner.ppo_train(0.0)
        published.append(dict(learner.publishing.tensors()))
    for other in published[1:]:
        assert published[0].keys() == other.keys()
        for name, tensor in published[0].items():
            assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def test_a_partial_optimizer_step_is_dropped_not_carried_over(make_learner, rollout, capsys):
    learner = make_learner("llama")
    fill(learner, rollout(count=12))  # 3 micro-batches, an update needs 2
    metrics = learner.ppo_train(0.0)
    assert metrics["policy/updates"] == 1 and learner.actor.model.micro_steps == 2
    assert "policy: dropping 4 of 12 responses a process" in capsys.readouterr().out


def test_old_log_probs_equal_openrlhf_own_forward(make_learner, rollout):
    """``QuantActor.forward`` (lm_head on acting positions only) against ``Actor.forward`` on the same weights."""
    from openrlhf.models import Actor

    learner = make_learner("llama", rollout__temperature=0.7)
    fill(learner, rollout())
    for batch in learner._fixed_micro_batches():
        with torch.no_grad():
            inputs = (batch.sequences, batch.action_mask, batch.attention_mask)
            ours, output = learner.actor(*inputs, return_output=True, return_entropy=True)
            theirs, reference = Actor.forward(learner.actor, *inputs, return_output=True, return_entropy=True)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)
        mask = batch.action_mask.bool()
        torch.testing.assert_close(output.entropy[mask], reference.entropy[mask], atol=2e-2, rtol=0)


def test_openrlhf_own_loss_still_trains(make_learner, rollout):
    learner = make_learner("llama", objective__name=None, quant__scheme="bf16")
    fill(learner, rollout())
    metrics = learner.ppo_train(0.0)
    assert metrics["policy/updates"] == 2 and "ppo_clip_ratio" in metrics


@pytest.mark.parametrize("zero", [2, 3])
def test_the_bucket_of_gradients_is_no_larger_than_the_model(make_learner, zero):
    learner = make_learner("llama", ds__zero_stage=zero)
    weights = sum(getattr(p, "ds_numel", p.numel()) for p in learner.actor.parameters())
    assert learner.actor.model.optimizer.reduce_bucket_size == reduce_bucket(weights) == weights


def test_zero_stages_compute_the_same_function(make_learner, rollout):
    """ZeRO-3 loads a model under ``zero.Init``, which would round the rotary frequencies to BF16."""
    log_probs = {}
    for zero in (2, 3):
        learner = make_learner("qwen3", ds__zero_stage=zero)
        rotary = [m.inv_freq for m in learner.actor.network.modules() if hasattr(m, "inv_freq")]
        assert rotary and all(frequencies.dtype == torch.float32 for frequencies in rotary)
        learner.actor.eval()
        ids = torch.arange(4, 404).remainder(500)[None]
        mask = torch.ones_like(ids)
        with torch.no_grad():
            log_probs[zero] = learner.actor(ids, mask[:, 1:], mask)
    assert torch.equal(log_probs[2], log_probs[3])


@pytest.mark.parametrize("layout", [{"train__micro_batch_size": 4}, BUDGET, BUDGET | {"ds__packing_samples": True}], ids=["padded", "dynamic", "packed"])
def test_kl_and_loss_are_means_over_the_tokens_however_they_are_batched(make_learner, rollout, layout):
    """Micro-batches of different sizes: OpenRLHF gives each one's part of the optimizer step's mean."""
    from openrlhf.models.utils import compute_approx_kl

    flags = {"quant__scheme": "bf16", "train__batch_size": 16, "algo__kl__init_coef": 0.01, "algo__kl__use_loss": True, "algo__kl__estimator": "k2"}
    found = {}
    for name, more in (("layout", layout), ("one", {"train__micro_batch_size": 16})):
        learner, items = make_learner("llama", **flags | more), rollout()
        for i, item in enumerate(items):
            item.base_action_log_probs = item.rollout_log_probs + 0.3 * i  # long and short responses differ
            item.advantages = item.advantages * (1 + i)
        items[3].action_mask[0, :-1] = 0
        fill(learner, items)
        total = count = 0
        for batch in learner._fixed_micro_batches():
            kl = compute_approx_kl(learner._log_probs(batch), batch.base_action_log_probs, kl_estimator="k2")
            total += float((kl * batch.action_mask).sum())
            count += int(batch.action_mask.sum())
        metrics = learner.ppo_train(0.01)
        assert metrics["policy/updates"] == 1 and metrics["kl"] == pytest.approx(total / count, rel=2e-3)
        found[name] = metrics["policy_loss"]
    assert found["layout"] == pytest.approx(found["one"], rel=2e-2)


def test_a_share_of_nothing_is_left_out(make_learner, rollout):
    items = rollout()
    for item in items:
        item.advantages.clamp_(min=0)
    learner = make_learner("llama")
    fill(learner, items)
    metrics = learner.ppo_train(0.0)
    assert metrics["objective/in_band_frac_pos"] > 0 and "objective/in_band_frac_neg" not in metrics


def test_the_first_publish_of_a_process_is_probed(make_learner):
    learner = make_learner("llama", sync__probe_every=5)
    probed = []
    learner.publishing.probe = SimpleNamespace(run=lambda actor, engines, version, is_sender: probed.append(version) or {})
    learner.publishing.version = 6  # resumed
    for _ in range(5):
        learner.broadcast_to_vllm()
    assert probed == [7, 10]
