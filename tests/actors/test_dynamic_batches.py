"""An optimizer step of dynamic batches has the gradient of the padded one: the same samples, in other micro-batches."""

import deepspeed
import pytest
import torch

from qarl_openrlhf.config import ConfigError

from .test_learner import fill

BUDGET = {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 64, "rollout__max_tokens_per_gpu": 64}
LAYOUTS = {
    "padded": {"train__micro_batch_size": 4},
    "one-batch": {"train__micro_batch_size": 16},
    "packed": {"ds__packing_samples": True},
    "dynamic": BUDGET,
    "dynamic-packed": BUDGET | {"ds__packing_samples": True},
}


def first_step(make_learner, rollout, **flags) -> tuple[torch.Tensor, float, int]:
    """(AdamW's first moment, a tenth of the clipped gradient, flattened; the gradient's norm; micro-batches) of one optimizer step."""
    learner = make_learner("llama", train__batch_size=16, quant__scheme="bf16", **flags)
    fill(learner, rollout())
    batches = learner._fixed_micro_batches()
    torch.manual_seed(5)
    metrics = learner.ppo_train(0.0)
    assert metrics["policy/updates"] == 1
    engine = learner.actor.model
    states = engine.optimizer.optimizer.state.values()
    return torch.cat([s["exp_avg"].flatten().float() for s in states]), float(engine.get_global_grad_norm()), len(batches)


@pytest.fixture(scope="module")
def padded():
    return {}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "padded"])
@pytest.mark.parametrize("zero, objective", [(2, "tbpo"), (2, "grpo_tis"), (2, "gspo"), (1, "tbpo"), (3, "tbpo")])
def test_the_gradient_is_that_of_padded_batches(make_learner, rollout, padded, zero, objective, layout):
    flags = {"ds__zero_stage": zero, "objective__name": objective}
    if (zero, objective) not in padded:
        padded[zero, objective] = first_step(make_learner, rollout, **flags, **LAYOUTS["padded"])
    expected, norm, micro_batches = padded[zero, objective]
    moment, its_norm, its_micro_batches = first_step(make_learner, rollout, **flags, **LAYOUTS[layout])
    assert its_micro_batches == {"one-batch": 1, "packed": micro_batches}.get(layout, its_micro_batches) and micro_batches == 4
    assert "dynamic" not in layout or its_micro_batches > 2
    assert its_norm == pytest.approx(norm, rel=0.01)
    assert torch.cosine_similarity(moment, expected, 0) > 0.999


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_muon_moves_the_weights_alike(make_learner, rollout, zero):
    moved = []
    for layout in ("padded", "dynamic-packed"):
        flags = {"ds__zero_stage": zero, "actor__optim": "muon", "actor__muon__lr": 1e-2, **LAYOUTS[layout]}
        learner = make_learner("llama", train__batch_size=16, quant__scheme="bf16", **flags)
        before = whole_weights(learner)
        fill(learner, rollout())
        learner.ppo_train(0.0)
        moved.append([a - b for a, b in zip(whole_weights(learner), before, strict=True)])
    for padded, dynamic in zip(*moved, strict=True):
        assert torch.cosine_similarity(padded.flatten(), dynamic.flatten(), 0) > 0.98


def whole_weights(learner) -> list[torch.Tensor]:
    """The matrices that Muon moves, in float32."""
    weights = {n: p for n, p in learner.actor.network.named_parameters() if "_proj" in n}
    with deepspeed.zero.GatheredParameters(list(weights.values())):
        return [p.detach().float().clone() for p in weights.values()]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"ds__overlap_comm": True, "ds__zero_stage": 1}, "--ds.overlap_comm with --ds.zero_stage 1"),
        ({"ds__deepcompile": True}, "--ds.deepcompile"),
    ],
)
def test_where_deepspeed_cannot_accumulate_them_is_refused(make_learner, capsys, flags, message):
    with pytest.raises((SystemExit, ConfigError)):
        make_learner("llama", **BUDGET, **flags)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("optim", ["adam", "muon"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_optimizer_in_main_memory_gets_the_same_gradient(make_learner, rollout, zero, optim):
    """DeepSpeed accumulates gradients another way for it: buffers of single tensors, which it has to add up and clip at the right time."""
    steps = {}
    for layout in ("padded", "dynamic-packed"):
        for offloaded in (False, True):
            flags = {"ds__zero_stage": zero, "actor__optim": optim, "actor__muon__lr": 1e-2, "ds__adam_offload": offloaded, **LAYOUTS[layout]}
            learner = make_learner("llama", train__batch_size=8, quant__scheme="bf16", **flags)  # two updates: accumulation begins anew
            fill(learner, rollout())
            before = whole_weights(learner)
            torch.manual_seed(5)
            assert learner.ppo_train(0.0)["policy/updates"] == 2
            moved = torch.cat([(after - old).flatten() for old, after in zip(before, whole_weights(learner), strict=True)])
            steps[layout, offloaded] = float(learner.actor.model.get_global_grad_norm()), moved
        norm, moved = steps[layout, False]
        its_norm, its_moved = steps[layout, True]
        alike = torch.cosine_similarity(its_moved, moved, 0)
        print(f"ZeRO-{zero} {optim} {layout}: norm {its_norm} for {norm}, cosine {alike}, equal {torch.equal(its_moved, moved)}")
        assert its_norm == pytest.approx(norm, rel=0.01) and moved.any() and alike > 0.999, layout
