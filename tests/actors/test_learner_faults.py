"""What goes wrong in the learner is named before anything is published."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.sync.probe import ProbeError


@pytest.mark.parametrize("zero", [2, 3])
def test_a_nan_in_a_master_weight_names_the_layer(make_learner, rollout, zero):
    """In DeepSpeed's float32 copy, which the next optimizer step casts to the BF16 parameter."""
    learner = make_learner("llama", ds__zero_stage=zero, train__batch_size=16)
    layer = learner.actor.network.model.layers[1].mlp.down_proj
    master = safe_get_full_fp32_param(layer.weight).clone()
    master[3, 5] = float("nan")
    safe_set_full_fp32_param(layer.weight, master)
    for experience in rollout():
        learner.replay_buffer.append(experience)
    learner.ppo_train(0.0)  # one optimizer step: its forward still had the old parameter
    sent = []
    with pytest.raises(QuantError, match=r"model\.layers\.1\.mlp\.down_proj: 1 of 32768 weights are NaN or infinite"):
        for name, _ in learner.publishing.tensors():
            sent.append(name)
    assert not any(name.startswith("model.layers.1.mlp.down_proj") for name in sent)
    assert torch.isfinite(safe_get_full_fp32_param(learner.actor.network.model.layers[0].mlp.down_proj.weight)).all()


class Engines:
    """In a publisher's place: what it was told."""

    def __init__(self):
        self.told = []

    def publish(self, tensors, version: int) -> dict:
        self.told.append(("published", version, len(list(tensors))))
        return {}

    def abandon(self, reason: str) -> None:
        self.told.append(("abandoned", reason))


@pytest.mark.parametrize("error", [ProbeError("engine 0 disagrees"), TimeoutError("no answer")])
def test_a_probe_that_fails_stops_the_engines(make_learner, error):
    """They are READY by then, and asynchronous rollouts would go on."""
    learner = make_learner("llama")
    learner.publishing.publisher = Engines()

    def run(*args, **kwargs):
        raise error

    learner.publishing.probe = SimpleNamespace(run=run)
    with pytest.raises(type(error), match=str(error)):
        learner.broadcast_to_vllm()
    (published, version, count), abandoned = learner.publishing.publisher.told
    assert published == "published" and count > 14
    assert abandoned == ("abandoned", f"version {version}: {error}")
