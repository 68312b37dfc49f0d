"""Which checkpoint is whole, which is taken, which is removed."""

import json
import os
import shutil
from argparse import Namespace

import pytest

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.checkpoint.errors import CheckpointError
from qarl_openrlhf.checkpoint.find import choose, step_of, tags
from qarl_openrlhf.checkpoint.write import remove_partial, rotate
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.resume import choose_checkpoint

FACTS = {"zero_stage": 2, "world_size": 1}


def make(directory, tag, *, facts=FACTS, files=("model.pt", "optim.pt"), size=100_000):
    made = directory / tag
    made.mkdir(parents=True)
    for name in files:
        (made / name).write_bytes(os.urandom(size))
    manifest.write(made, manifest.describe(made, files, sync=True), facts)
    return made


def test_the_newest_whole_one_is_taken(tmp_path):
    for tag in ("global_step2", "global_step10", "best_global_step10", "global_step9"):
        make(tmp_path / "_actor", tag)
    assert tags(tmp_path / "_actor") == ["global_step10", "best_global_step10", "global_step9", "global_step2"]
    assert choose(tmp_path, ["_actor"], facts=FACTS).tag == "global_step10"
    assert choose(tmp_path, ["_actor"], facts=FACTS, tag="best_global_step10").tag == "best_global_step10"
    assert step_of("global_step3.partial") is None and step_of("global_step3_hf") is None


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(50_000)


def flip(path):
    with open(path, "r+b") as file:
        file.seek(77_777)
        byte = file.read(1)
        file.seek(77_777)
        file.write(bytes([byte[0] ^ 1]))


BREAK = {
    "cut off": (lambda d: truncate(d / "optim.pt"), "optim.pt has 50000 bytes, 100000 were written"),
    "one bit": (lambda d: flip(d / "model.pt"), "model.pt does not hold the bytes that were written"),
    "file gone": (lambda d: (d / "model.pt").unlink(), "model.pt is missing"),
    "never finished": (lambda d: (d / manifest.NAME).unlink(), "never finished"),
    "manifest cut off": (lambda d: (d / manifest.NAME).write_text('{"files": {"mod'), "never finished"),
    "manifest of something else": (lambda d: (d / manifest.NAME).write_text("[1]"), "never finished"),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_newest_one_falls_back_to_the_one_before_and_says_so(tmp_path, how):
    make(tmp_path / "_actor", "global_step1")
    broken = make(tmp_path / "_actor", "global_step2")
    do, message = BREAK[how]
    do(broken)
    choice = choose(tmp_path, ["_actor"], facts=FACTS)
    assert choice.tag == "global_step1"
    (note,) = choice.notes
    assert "global_step2 is not whole" in note and message in note and str(broken) in note
    with pytest.raises(CheckpointError, match="global_step2 is not whole"):
        choose(tmp_path, ["_actor"], facts=FACTS, tag="global_step2")
    shutil.rmtree(tmp_path / "_actor" / "global_step1")
    with pytest.raises(CheckpointError, match="no checkpoint under .* is whole.*start anew"):
        choose(tmp_path, ["_actor"], facts=FACTS)


def test_policy_and_critic_go_on_from_the_same_step(tmp_path):
    for step in (1, 2):
        make(tmp_path / "_actor", f"global_step{step}")
    make(tmp_path / "_critic", "global_step1")
    choice = choose(tmp_path, ["_actor", "_critic"], facts=FACTS)
    assert choice.tag == "global_step1" and "_critic/global_step2 is missing" in choice.notes[0]


@pytest.mark.parametrize(("name", "value"), [("zero_stage", 3), ("world_size", 4)])
def test_a_checkpoint_of_another_layout_is_refused_by_name(tmp_path, name, value):
    make(tmp_path / "_actor", "global_step1")
    with pytest.raises(CheckpointError, match=rf"was written with .*{FACTS[name]}, this run has {value}"):
        choose(tmp_path, ["_actor"], facts=FACTS | {name: value})


def arguments(path, **ckpt):
    return Namespace(
        ckpt=Namespace(**{"path": str(path), "load_enable": True, "load_tag": None} | ckpt),
        critic=Namespace(model_name_or_path=None),
        ds=Namespace(zero_stage=2),
        actor=Namespace(num_nodes=1, num_gpus_per_node=1),
    )


def test_before_the_run_starts(tmp_path):
    args = arguments(tmp_path)
    assert "starts anew" in choose_checkpoint(args)[0] and not args.ckpt.load_enable
    (tmp_path / "_actor" / "global_step1.partial").mkdir(parents=True)  # killed while it wrote its first
    args = arguments(tmp_path)
    assert "starts anew" in choose_checkpoint(args)[0] and not args.ckpt.load_enable
    make(tmp_path / "_actor", "global_step1")
    args = arguments(tmp_path)
    assert "resuming from" in choose_checkpoint(args)[-1] and args.ckpt.load_enable and args.ckpt.load_tag == "global_step1"
    with pytest.raises(ConfigError, match="has no checkpoint global_step7: it has global_step1"):
        choose_checkpoint(arguments(tmp_path, load_tag="global_step7"))
    with pytest.raises(ConfigError, match="--ckpt.load_tag global_step1 without --ckpt.load_enable"):
        choose_checkpoint(arguments(tmp_path, load_enable=False, load_tag="global_step1"))
    args = arguments(tmp_path, load_enable=False)
    assert choose_checkpoint(args) == [] and args.ckpt.load_tag is None


def metric_of(directory):
    path = os.path.join(directory, "metric.json")
    return json.load(open(path)) if os.path.exists(path) else None


def test_rotation_keeps_the_best_and_the_one_just_written(tmp_path):
    for step in (1, 2, 3, 4):
        made = make(tmp_path, f"global_step{step}")
        if step in (2, 3):
            (made / "metric.json").write_text(str({2: 0.9, 3: 0.1}[step]))
    make(tmp_path, "best_global_step2")
    # Without a metric first, then the worst; never the newest.
    assert rotate(tmp_path, "global_step4", keep=3, max_gb=1, metric=metric_of) == ["global_step1"]
    assert rotate(tmp_path, "global_step4", keep=2, max_gb=1, metric=metric_of) == ["global_step3"]
    assert rotate(tmp_path, "global_step4", keep=1, max_gb=0, metric=metric_of) == ["global_step2"]
    assert tags(tmp_path) == ["global_step4", "best_global_step2"]
    make(tmp_path, "best_global_step4")
    assert rotate(tmp_path, "best_global_step4", keep=1, max_gb=1, metric=metric_of) == ["best_global_step2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best_global_step4", "global_step4"]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / "global_step3.partial" / "deep").mkdir(parents=True)
    make(tmp_path, "global_step2")
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step2"]
