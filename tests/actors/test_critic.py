"""The critic's step under real DeepSpeed: whole optimizer steps only, as the policy's."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from torch.distributed.device_mesh import init_device_mesh

from qarl_openrlhf.actors.micro_batches import keep_whole_steps
from tests.ranks import Ranks
from tests.tiny_models import save_tiny_model

from .conftest import build_critic, learner_args, make_rollout


@pytest.fixture
def make_critic(one_rank, tmp_path):
    return lambda **flags: build(save_tiny_model(tmp_path, "llama"), **flags)


@pytest.fixture
def critic(make_critic):
    return make_critic()


def build(model: str, **flags):
    """8 responses an optimizer step, in micro-batches of 4."""
    return build_critic(learner_args(model, algo__advantage__estimator="gae", critic__adam__lr=1e-3, quant__scheme="bf16", **flags))


def give(critic, count: int, seed: int) -> None:
    for item in make_rollout(seed, count):
        item.values, item.returns = torch.zeros_like(item.advantages), item.advantages
        critic.append(item)


def test_a_partial_optimizer_step_is_dropped_not_carried_over(critic, capsys):
    engine = critic.critic
    for rollout, count in enumerate((12, 20, 13), start=1):  # of 3, 5 and 3 micro-batches a step takes 2
        before = engine.micro_steps, engine.global_steps
        give(critic, count, rollout)
        status = critic.fit()
        steps = count // 8
        assert (engine.micro_steps - before[0], engine.global_steps - before[1]) == (2 * steps, steps)
        assert status["critic_loss"] > 0 and not critic.trainer.replay_buffer.items
        assert f"critic: dropping {count % 8} of {count} responses" in capsys.readouterr().out
    give(critic, 5, 4)
    assert critic.fit() == {} and "critic: dropping 5 of 5" in capsys.readouterr().out
    give(critic, 16, 5)
    assert critic.fit()["critic_loss"] > 0 and "dropping" not in capsys.readouterr().out


LAYOUTS = {
    "padded": {},
    "dynamic": {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 40, "rollout__max_tokens_per_gpu": 40},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_values_are_means_over_the_tokens_however_they_are_batched(make_critic, layout):
    critic = make_critic(train__batch_size=16, **LAYOUTS[layout])
    give(critic, 16, 1)
    values, returns = [], []
    for item in critic.trainer.replay_buffer.items:
        mask = item.action_mask[None]
        values.append(critic.forward(item.sequences[None], mask, item.attention_mask[None])[mask.bool()].double())
        returns.append(item.returns[None][mask.bool()].double())
    values, returns = torch.cat(values), torch.cat(returns)
    clipped = values.clamp(-critic.strategy.args.critic.value_clip, critic.strategy.args.critic.value_clip)  # the old ones are 0
    steps = critic.critic.global_steps
    status = critic.fit()
    assert critic.critic.global_steps == steps + 1
    assert status["values"] == pytest.approx(float(values.mean()), rel=0.01)
    loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    assert status["critic_loss"] == pytest.approx(float(loss.mean()), rel=0.01)


def test_the_gradients_norm_is_of_the_last_step(critic):
    for seed in (1, 2):
        give(critic, 16, seed)
        status = critic.fit()
        assert status["critic_grad_norm"] == float(critic.critic.get_global_grad_norm()) > 0
        assert status["critic_lr"] == critic.trainer.critic_scheduler.get_last_lr()[0]


def keep(rank: int, world: int, directory: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
    strategy = SimpleNamespace(accumulated_gradient=2, ds_device_mesh=mesh, print=lambda line: None)
    kept = []
    for count in (26, (19, 12)[rank], (8, 3)[rank]):
        buffer = NaiveReplayBuffer(4)
        buffer.items = list(range(count))
        keep_whole_steps(buffer, strategy, "critic")
        kept.append(buffer.items)
    Path(directory, str(rank)).write_text(json.dumps(kept))


def test_all_ranks_keep_as_many_steps_as_the_rank_with_the_fewest(tmp_path):
    Ranks(keep, 2, str(tmp_path)).wait(120)
    for rank in range(2):
        kept = json.loads((tmp_path / str(rank)).read_text())
        assert [len(items) for items in kept] == [24, 8, 0]
        assert all(items == sorted(set(items)) for items in kept)
