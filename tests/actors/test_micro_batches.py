"""A collated micro-batch on the device: what training reads is there, what only metrics read stays in main memory, whole."""

import dataclasses

import pytest
import torch
from openrlhf.trainer.ppo_utils import experience as openrlhf_experience

from qarl_openrlhf.actors.micro_batches import to_device
from qarl_openrlhf.patches import openrlhf_experience as patch

META = torch.device("meta")


@pytest.fixture
def kinds(monkeypatch):
    monkeypatch.setattr(openrlhf_experience, "Experience", patch.StampedExperience)
    return patch.StampedExperience


def items(kinds, count: int) -> list:
    """Single responses as OpenRLHF's replay buffer holds them: per-response metrics are tensors without a dimension."""
    width = 6
    batch = kinds(
        **{f.name: torch.rand(count, width) for f in dataclasses.fields(kinds) if kinds.is_step_tensor_field(f.name)},
        **{f.name: torch.rand(count) for f in dataclasses.fields(kinds) if kinds.is_episode_tensor_field(f.name)},
        prompts=["p"] * count,
        labels=["l"] * count,
        info={"reward": torch.rand(count), "kl": torch.arange(count), "name": ["a"] * count, "hot": [0.5] * count},
    )
    return openrlhf_experience.split_experience_batch(batch)


def test_step_tensors_move_and_per_response_values_stay_as_one_tensor(kinds):
    split = items(kinds, 5)
    batch = to_device(openrlhf_experience.make_experience_batch(split), META)
    for field in dataclasses.fields(kinds):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            assert value.device.type == ("meta" if kinds.is_step_tensor_field(field.name) else "cpu"), field.name
    assert batch.weight_versions.device.type == "meta"
    assert batch.info["reward"].tolist() == [float(item.info["reward"]) for item in split]
    assert batch.info["kl"].tolist() == [0, 1, 2, 3, 4] and batch.info["hot"].tolist() == [0.5] * 5
    assert batch.info["name"] == ["a"] * 5 and batch.prompts == ["p"] * 5


def test_openrlhf_collates_per_response_metrics_to_lists_of_tensors(kinds):
    """What `to_device` mends. Should OpenRLHF collate them to tensors one day, it has nothing left to do."""
    batch = openrlhf_experience.make_experience_batch(items(kinds, 3))
    assert [type(x) for x in batch.info["reward"]] == [torch.Tensor] * 3
