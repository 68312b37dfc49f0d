"""Which checkpoint is whole, which is taken, which is removed."""

import json
import os
import shutil
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.checkpoint.errors import CheckpointError
from qarl_openrlhf.checkpoint.facts import facts_of
from qarl_openrlhf.checkpoint.find import choose, step_of, tags
from qarl_openrlhf.checkpoint.flags import deciding, flatten
from qarl_openrlhf.checkpoint.prompts import position
from qarl_openrlhf.checkpoint.write import remove_partial, rotate, rotate_together, write_checkpoint
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.metrics.run_directory import open_run_directory
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
    with pytest.raises(CheckpointError, match=rf"was written with --.* {FACTS[name]}, this run has {value}"):
        choose(tmp_path, ["_actor"], facts=FACTS | {name: value})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_directory(tmp_path_factory.mktemp("model")))


def model_directory(path, **fields):
    from transformers import LlamaConfig

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    LlamaConfig(**shape | fields).save_pretrained(path)
    return path


def arguments(path, model, **flags):
    """As a run has them, of its flags those that are looked at; a flag with "__" for "."."""
    values = {
        "actor.model_name_or_path": model, "actor.num_nodes": 1, "actor.num_gpus_per_node": 1, "actor.lr_scheduler": "cosine",
        "critic.model_name_or_path": None, "critic.num_nodes": 1, "critic.num_gpus_per_node": 1,
        "ds.zero_stage": 2, "ds.lora.rank": 0, "quant.scheme": "w4a16", "train.seed": 0,
        "train.num_episodes": 1, "rollout.batch_size": 4, "rollout.stop": ["a"], "model.max_positions": None, "model.rope_theta": None,
        "ckpt.path": str(path), "ckpt.load_enable": True, "ckpt.load_tag": None, "ckpt.save_steps": 5, "metrics.dir": str(path / "run"),
        "logger.wandb.key": "secret",
    }  # fmt: skip
    for role in ("actor", "critic"):
        values |= {f"{role}.optim": "adam", f"{role}.adam.state_bits": 32, f"{role}.adam.lr": 1e-6}
    args = Namespace()
    for name, value in (values | {name.replace("__", "."): value for name, value in flags.items()}).items():
        *groups, last = name.split(".")
        inner = args
        for group in groups:
            inner.__dict__.setdefault(group, Namespace())
            inner = getattr(inner, group)
        setattr(inner, last, value)
    return args


def written_by(args, role="actor") -> dict:
    """What the strategy writes into a checkpoint of a run with these arguments."""
    from transformers import AutoConfig

    group = getattr(args, role)
    own = facts_of(args, role, AutoConfig.from_pretrained(group.model_name_or_path)) | {"world_size": group.num_nodes * group.num_gpus_per_node}
    return json.loads(json.dumps(FACTS | own | {"flags": deciding(dict(flatten(args)))}))


def test_before_the_run_starts(tmp_path, model):
    args = arguments(tmp_path, model)
    assert "starts anew" in choose_checkpoint(args)[0] and not args.ckpt.load_enable
    (tmp_path / "_actor" / "global_step1.partial").mkdir(parents=True)  # killed while it wrote its first
    args = arguments(tmp_path, model)
    assert "starts anew" in choose_checkpoint(args)[0] and not args.ckpt.load_enable
    make(tmp_path / "_actor", "global_step1")
    args = arguments(tmp_path, model)
    assert "resuming from" in choose_checkpoint(args)[-1] and args.ckpt.load_enable and args.ckpt.load_tag == "global_step1"
    with pytest.raises(ConfigError, match="has no checkpoint global_step7: it has global_step1"):
        choose_checkpoint(arguments(tmp_path, model, ckpt__load_tag="global_step7"))
    with pytest.raises(ConfigError, match="--ckpt.load_tag global_step1 without --ckpt.load_enable"):
        choose_checkpoint(arguments(tmp_path, model, ckpt__load_enable=False, ckpt__load_tag="global_step1"))
    args = arguments(tmp_path, model, ckpt__load_enable=False)
    assert choose_checkpoint(args) == [] and args.ckpt.load_tag is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"quant__scheme": "w8a8"}, r"--quant.scheme w4a16, this run has w8a8: a run keeps its scheme; resume with w4a16"),
        ({"quant__scheme": "w4a16:rollout"}, "--quant.scheme w4a16, this run has w4a16:rollout"),
        ({"actor__optim": "muon"}, "--actor.optim adam, this run has muon"),
        ({"actor__adam__state_bits": 8}, "--actor.adam.state_bits 32, this run has 8"),
        ({"ds__lora__rank": 8}, "--ds.lora.rank 0, this run has 8"),
        ({"ds__zero_stage": 3}, "--ds.zero_stage 2, this run has 3"),
        ({"actor__num_gpus_per_node": 2}, "--actor.num_nodes x --actor.num_gpus_per_node 1, this run has 2"),
        ({"critic__num_gpus_per_node": 2}, "--critic.num_nodes x --critic.num_gpus_per_node 1, this run has 2"),
        ({"critic__optim": "muon"}, "_critic.global_step1 was written with --critic.optim adam, this run has muon"),
    ],
)
def test_what_a_checkpoint_cannot_be_loaded_with_is_refused_by_flag(tmp_path, model, flags, message):
    first = arguments(tmp_path, model, critic__model_name_or_path=model)
    for role in ("actor", "critic"):
        make(tmp_path / f"_{role}", "global_step1", facts=written_by(first, role))
    assert choose_checkpoint(first) == [f"resuming from {tmp_path}/_actor/global_step1"]
    with pytest.raises(ConfigError, match=rf"--ckpt.load_enable: {tmp_path}/_.*was written with .*{message.removeprefix('_critic.global_step1 was written with ')}"):
        choose_checkpoint(arguments(tmp_path, model, critic__model_name_or_path=model, **flags))


@pytest.mark.parametrize("sizes", [{"actor__num_gpus_per_node": 2}, {"critic__num_gpus_per_node": 4, "actor__num_nodes": 2}])
def test_policy_and_critic_have_as_many_processes_each_as_before(tmp_path, model, sizes):
    args = arguments(tmp_path, model, critic__model_name_or_path=model, **sizes)
    for role in ("actor", "critic"):
        make(tmp_path / f"_{role}", "global_step1", facts=written_by(args, role), size=10)
    assert choose_checkpoint(args) == [f"resuming from {tmp_path}/_actor/global_step1"]
    for role in ("actor", "critic"):
        group = getattr(args, role)
        had = group.num_nodes * group.num_gpus_per_node
        more = {f"{role}__num_gpus_per_node": group.num_gpus_per_node * 2}
        flags = f"--{role}.num_nodes x --{role}.num_gpus_per_node"
        with pytest.raises(ConfigError, match=f"_{role}/global_step1 was written with {flags} {had}, this run has {2 * had}"):
            choose_checkpoint(arguments(tmp_path, model, critic__model_name_or_path=model, **sizes | more))


def test_another_model_is_refused(tmp_path, model):
    make(tmp_path / "_actor", "global_step1", facts=written_by(arguments(tmp_path, model)))
    other = str(model_directory(tmp_path / "other", hidden_size=128, num_hidden_layers=3))
    with pytest.raises(ConfigError, match="of a model with hidden_size 64, num_hidden_layers 2, head_dim 16; --actor.model_name_or_path .* has 128, 3, 32"):
        choose_checkpoint(arguments(tmp_path, other))
    same = str(model_directory(tmp_path / "moved"))
    assert "--actor.model_name_or_path" in choose_checkpoint(arguments(tmp_path, same))[-1]


OTHER = {"train__seed": 7, "rollout__batch_size": 8, "rollout__stop": ["a", "b"], "train__num_episodes": 2}
NOTE = (
    "resumed with other flags than before: --rollout.batch_size 4 -> 8, --rollout.stop a -> a b, --train.num_episodes 1 -> 2, "
    "--train.seed 0 -> 7; the run may not go on bit for bit"
)


def test_every_other_flag_that_differs_is_named(tmp_path, model):
    first = arguments(tmp_path, model)
    facts = written_by(first)
    assert "secret" not in json.dumps(facts)
    made = make(tmp_path / "_actor", "global_step1", facts=facts)
    assert choose_checkpoint(arguments(tmp_path, model, **OTHER))[-1] == NOTE
    without = {"ckpt__save_steps": 1, "metrics__dir": "elsewhere", "logger__wandb__key": "other"}
    assert len(choose_checkpoint(arguments(tmp_path, model, **without))) == 1
    # A constant learning rate does not depend on how long the run will be.
    facts = written_by(arguments(tmp_path, model, actor__lr_scheduler="constant"))
    shutil.rmtree(made)
    make(tmp_path / "_actor", "global_step1", facts=facts)
    assert len(choose_checkpoint(arguments(tmp_path, model, actor__lr_scheduler="constant", train__num_episodes=2))) == 1


def test_an_older_checkpoint_is_taken_and_compared_by_the_record_of_its_run(tmp_path, model):
    make(tmp_path / "_actor", "global_step1")  # with neither scheme nor flags
    assert len(choose_checkpoint(arguments(tmp_path, model, quant__scheme="w8a8"))) == 1
    (tmp_path / "run").mkdir()
    for text in ("{", "[1]", json.dumps({"flags": 3})):
        (tmp_path / "run" / "run.json").write_text(text)
        assert len(choose_checkpoint(arguments(tmp_path, model))) == 1
    open_run_directory(str(tmp_path / "run"), dict(flatten(arguments(tmp_path, model))), resume=False)
    assert choose_checkpoint(arguments(tmp_path, model, **OTHER))[-1] == NOTE


@pytest.mark.parametrize("workers", [0, 1])
def test_fewer_prompts_than_a_resume_passes_over_are_refused(tmp_path, model, workers):
    """Judged by the loader that OpenRLHF has: in the middle of an episode, at its end, and in the next."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(prompts):
        return StatefulDataLoader(range(prompts), batch_size=1, shuffle=True, drop_last=True, num_workers=workers)

    rows = tmp_path / "prompts.jsonl"
    for drawn in (0, 3, 8, 9):
        first = loader(8)
        prompts = iter(first)
        for _ in range(drawn):
            next(prompts, None)
        state = {"episode": 1, "data_loader_state_dict": first.state_dict()}
        had = with_prompts(tmp_path, model, rows, 8)
        shutil.rmtree(tmp_path / "_actor", ignore_errors=True)
        made = make(tmp_path / "_actor", "global_step2", facts=written_by(had) | {"prompts": position(state)}, size=10)
        for now in (2, 3, 4, 8, 20):
            again = loader(now)
            again.load_state_dict(state["data_loader_state_dict"])
            rows.write_text('{"input": "a"}\n' * now)
            try:
                next(iter(again), None)
            except StopIteration:
                message = f"{made} was written after {min(drawn, 8)} prompts of its episode, and this run has {now} "
                for flags, why in (({}, r"\(its files have fewer rows"), ({"data__max_samples": now}, rf"\(--data.max_samples 8 -> {now}\)")):
                    with pytest.raises(ConfigError, match=message + why):
                        choose_checkpoint(with_prompts(tmp_path, model, rows, 8, **flags))
                choose_checkpoint(with_prompts(tmp_path, model, rows, 8, train__num_episodes=1))  # nothing is left to do
            else:
                choose_checkpoint(with_prompts(tmp_path, model, rows, 8))
        del prompts


def with_prompts(path, model, rows, samples, **flags):
    data = {"max_samples": samples, "prompt_dataset": str(rows), "prompt_probs": None, "input_key": "input", "label_key": None}
    data |= {"apply_chat_template": False, "input_template": None, "prompt_split": "train"}
    given = {f"data__{name}": value for name, value in data.items()} | {"train__num_episodes": 2}
    return arguments(path, model, **given | flags)


def test_prompts_of_another_origin_are_bounded_by_the_flag_alone(tmp_path, model):
    had = with_prompts(tmp_path, model, "owner/name", 100)
    make(tmp_path / "_actor", "global_step2", facts=written_by(had) | {"prompts": {"drawn": 8, "episode": 0}})
    choose_checkpoint(with_prompts(tmp_path, model, "owner/name", 8))
    with pytest.raises(ConfigError, match="after 8 prompts of its episode, and this run has 7 .--data.max_samples 100 -> 7"):
        choose_checkpoint(with_prompts(tmp_path, model, "owner/name", 7))


def test_a_position_is_of_the_episode_that_is_drawn_from_next():
    state = {"episode": 0, "data_loader_state_dict": {"_sampler_iter_yielded": 8}}
    assert position(state) == {"drawn": 8, "episode": 0}
    assert position(state | {"rollout": {"exhausted": True, "sample_buffer": [1]}}) == {"drawn": 8, "episode": 1}
    assert position(state | {"rollout": {"exhausted": False, "sample_buffer": [1]}}) == {"drawn": 8, "episode": 0}
    assert position({"global_step": 3}) == position({"episode": 0, "data_loader_state_dict": {}}) == {}


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


def test_a_complete_one_that_only_lacks_its_name_gets_it(tmp_path):
    """One that was being written again has a torn or a whole copy aside; the copy is never taken."""
    make(tmp_path / "_actor", "global_step2.partial")
    make(tmp_path / "_actor", "global_step2.old.partial")
    make(tmp_path / "_actor", "global_step1.old.partial")
    assert choose(tmp_path, ["_actor"], facts=FACTS).tag == "global_step2"
    remove_partial(tmp_path / "_actor")
    assert os.listdir(tmp_path / "_actor") == ["global_step2"]


class Killed(BaseException):
    pass


class Kill:
    """Ends the writer at its n-th renaming or removal, or halfway through that removal."""

    def __init__(self, monkeypatch, at: int):
        self.left = at
        replace, rmtree = os.replace, shutil.rmtree
        monkeypatch.setattr(os, "replace", lambda *names: (self.count(), replace(*names)))
        monkeypatch.setattr(shutil, "rmtree", lambda path, **how: (self.count(), self.half(path), rmtree(path, **how)))

    def count(self):
        self.left -= 1
        if self.left == 0:
            raise Killed

    def half(self, path):
        if self.left == 1 and os.path.isdir(path):
            for name in os.listdir(path)[:1]:
                os.unlink(os.path.join(path, name))
        self.count()


class Engine:
    """DeepSpeed's, with a file for its state."""

    module = SimpleNamespace(parameters=list)

    def save_checkpoint(self, directory, *, tag, client_state, save_latest):
        with open(os.path.join(directory, tag, "states.pt"), "wb") as file:
            file.write(b"x" * 1000)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    if dist.is_initialized():  # by tests before it, in this process
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(path, models, tag):
    """As the strategy does, one model after the other: each is done before the next has begun."""
    for model in models:
        write_checkpoint(Engine(), path / model, tag, client_state={}, rank_state={}, facts=FACTS)
        rotate_together([path / other for other in models], tag, keep=1, max_gb=1, metric=metric_of)


@pytest.mark.parametrize("models", [["_actor"], ["_actor", "_critic"], ["_critic", "_actor"]], ids=" ".join)
def test_a_run_that_keeps_one_and_is_killed_anywhere_has_one_to_go_on_from(tmp_path, monkeypatch, one_process, models):
    """In every renaming and removal of a new step, of one that is written again, and of OpenRLHF's "best" one."""
    for at in range(1, 100):
        path = tmp_path / str(at)
        save(path, models, "global_step1")
        with monkeypatch.context() as patch:
            kill = Kill(patch, at)
            try:
                for tag in ("global_step2", "global_step2", "best_global_step2", "best_global_step3", "global_step3"):
                    save(path, models, tag)
            except Killed:
                pass
        assert choose(path, models, facts=FACTS).tag
        for tag in ("best_global_step4", "global_step4"):
            save(path, models, tag)
        left = {model: sorted(os.listdir(path / model)) for model in models}
        assert left == {model: ["best_global_step4", "global_step4", "latest"] for model in models}, at
        if kill.left > 0:
            break
    assert 20 < at < 99


def test_a_critic_that_no_run_has_any_more_holds_nothing_back(tmp_path):
    for step in (1, 2):
        make(tmp_path / "_actor", f"global_step{step}")
    make(tmp_path / "_critic", "global_step1")
    how = {"keep": 1, "max_gb": 1, "metric": metric_of}
    assert rotate_together([tmp_path / "_actor", tmp_path / "_critic"], "global_step2", **how) == []
    assert rotate_together([tmp_path / "_actor"], "global_step2", **how) == [tmp_path / "_actor" / "global_step1"]


def test_two_models_that_finish_at_once_remove_the_same_ones(tmp_path, monkeypatch):
    """Each finds, at any moment, what it wanted to size up, set aside or remove gone by the other's hand."""
    how = {"keep": 1, "max_gb": 1, "metric": metric_of}
    for at in range(1, 20):
        directories = [tmp_path / str(at) / model for model in ("_actor", "_critic")]
        for directory in directories:
            for step in (1, 2, 3):
                make(directory, f"global_step{step}", size=10)
        left, done = at, []

        def other(call):
            def wrapped(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    done.extend(rotate_together(directories, "global_step3", **how))
                return call(*args, **kwargs)

            return wrapped

        with monkeypatch.context() as patch:
            for module, name in ((os, "replace"), (os.path, "getsize"), (shutil, "rmtree")):
                patch.setattr(module, name, other(getattr(module, name)))
            done.extend(rotate_together(directories, "global_step3", **how))
        assert [tags(directory) for directory in directories] == [["global_step3"]] * 2
        assert sorted(done) == sorted(directory / f"global_step{step}" for directory in directories for step in (1, 2))
        assert all(os.listdir(directory) == ["global_step3"] for directory in directories)
