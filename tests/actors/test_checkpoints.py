"""Checkpoints of a real learner: written whole or not at all, and training goes on from them bit for bit."""

import random
import resource
import shutil

import numpy
import pytest
import torch

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.checkpoint.errors import CheckpointError
from qarl_openrlhf.checkpoint.find import choose, tags
from qarl_openrlhf.checkpoint.state import random_state, set_random_state
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.resume import choose_checkpoint


def train(learner, items):
    for item in items:
        learner.replay_buffer.append(item)
    metrics = learner.ppo_train(0.0)
    learner.replay_buffer.clear()
    return metrics


def save(learner, directory, tag, keep=2):
    learner.strategy.rank_state = {"version": 3}
    learner.strategy.save_ckpt(learner.actor.model, str(directory), tag, max_num=keep, client_state={"global_step": 3})


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.publishing.tensors()}


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("optim", ["adam", "muon"])
def test_training_goes_on_bit_for_bit(make_learner, rollout, tmp_path, zero, optim):
    flags = {"ds__zero_stage": zero, "actor__optim": optim, "ckpt__path": str(tmp_path)}
    if optim == "muon":
        flags["actor__muon__lr"] = 1e-3
    first = make_learner(**flags)
    train(first, rollout(seed=1))
    save(first, tmp_path / "_actor", "global_step1")
    expected = [train(first, rollout(seed=seed)) for seed in (2, 3)]

    torch.manual_seed(99)  # whatever a new process has drawn by then
    second = make_learner(**flags)
    assert second.strategy.loaded_state is None
    weights(second)  # packed weights of the start policy are at hand: a load must drop them
    facts = {"zero_stage": zero, "world_size": 1}
    second.strategy.args.ckpt.load_tag = choose(tmp_path, ["_actor"], facts=facts).tag
    _, states = second.strategy.load_ckpt(second.actor.model, str(tmp_path / "_actor"))
    assert states["global_step"] == 3 and second.strategy.loaded_state["version"] == 3
    set_random_state(second.strategy.loaded_state["random"])
    again = [train(second, rollout(seed=seed)) for seed in (2, 3)]
    for one, other in zip(expected, again, strict=True):
        differing = [k for k in one if not k.startswith(("timing/", "kernels/")) and not same(one[k], other[k])]
        assert not differing, differing
    for (name, one), other in zip(weights(first).items(), weights(second).values(), strict=True):
        assert torch.equal(one, other), name


def test_a_checkpoint_knows_the_run_that_wrote_it(make_learner, tmp_path):
    learner = make_learner(ckpt__path=str(tmp_path), ckpt__load_enable=True)
    save(learner, tmp_path / "_actor", "global_step1")
    args = learner.strategy.args
    assert choose_checkpoint(args) == [f"resuming from {tmp_path}/_actor/global_step1"]
    state = {"episode": 0, "data_loader_state_dict": {"_sampler_iter_yielded": 6}}
    learner.strategy.save_ckpt(learner.actor.model, str(tmp_path / "_actor"), "global_step2", client_state=state)
    assert manifest.read(tmp_path / "_actor" / "global_step2")["prompts"] == {"drawn": 6, "episode": 0}
    shutil.rmtree(tmp_path / "_actor" / "global_step2")
    args.train.seed, args.ckpt.load_tag = 7, None
    assert "--train.seed 42 -> 7; the run may not" in choose_checkpoint(args)[-1]
    for group, name, value in ((args.quant, "scheme", "w8a8"), (args.actor, "optim", "muon")):
        before = getattr(group, name)
        setattr(group, name, value)
        with pytest.raises(ConfigError, match=f"{name} {before}, this run has {value}"):
            choose_checkpoint(args)
        setattr(group, name, before)


def same(one, other):
    return one == other or (one != one and other != other)


def test_a_checkpoint_that_cannot_be_written_names_the_directory_and_leaves_the_one_before(make_learner, rollout, tmp_path):
    learner = make_learner(ckpt__path=str(tmp_path))
    train(learner, rollout())
    directory = tmp_path / "_actor"
    save(learner, directory, "global_step1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a file cannot grow further, as on a full disk
    try:
        with pytest.raises(CheckpointError, match=rf"{directory}/global_step2 could not be written: .*[MG]iB are free"):
            save(learner, directory, "global_step2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in directory.iterdir() if p.is_dir()) == ["global_step1"]
    assert choose(tmp_path, ["_actor"], facts={"zero_stage": learner.args.ds.zero_stage, "world_size": 1}).tag == "global_step1"
    save(learner, directory, "global_step2")  # there is room again
    assert manifest.problem(directory / "global_step2") is None


def test_too_little_room_is_refused_before_writing_in_figures_that_differ(make_learner, tmp_path, monkeypatch):
    learner = make_learner(ckpt__path=str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**18))
    with pytest.raises(CheckpointError, match=r"0\.2 MiB are free, it takes about \d+\.\d MiB"):
        save(learner, tmp_path / "_actor", "global_step1")


def test_written_again_rotated_and_cleaned_up(make_learner, tmp_path):
    learner = make_learner(ckpt__path=str(tmp_path))
    directory = tmp_path / "_actor"
    (directory / "global_step9.partial").mkdir(parents=True)
    for tag in ("global_step1", "global_step2", "global_step2", "global_step3"):
        save(learner, directory, tag)
    assert sorted(p.name for p in directory.iterdir() if p.is_dir()) == ["global_step2", "global_step3"]
    assert (directory / "latest").read_text() == "global_step3"
    assert all(manifest.problem(directory / tag) is None for tag in ("global_step2", "global_step3"))


def test_with_a_critic_the_one_before_stays_until_both_hold_the_new_one(make_learner, tmp_path):
    learner = make_learner(ckpt__path=str(tmp_path))
    learner.strategy.args.critic.model_name_or_path = "critic"
    roles, facts = ["_actor", "_critic"], {"zero_stage": learner.args.ds.zero_stage, "world_size": 1}
    for step in (1, 2, 3):
        for role in roles:
            save(learner, tmp_path / role, f"global_step{step}", keep=1)
            if role == "_critic" or step > 1:
                assert choose(tmp_path, roles, facts=facts).tag == f"global_step{step if role == '_critic' else step - 1}"
    assert [tags(tmp_path / role) for role in roles] == [["global_step3"], ["global_step3"]]


def test_random_state_is_all_of_it():
    def draw():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    state = random_state()
    expected = draw()
    assert draw() != expected
    set_random_state(state)
    assert draw() == expected


