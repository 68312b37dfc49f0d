"""A resume with nothing left to do ends before Ray starts, and only where that is certain."""

import os
from pathlib import Path

import pytest

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.preflight.finished import already_finished
from qarl_openrlhf.preflight.resume import choose_checkpoint
from tests.checkpoint.test_files import make, with_prompts, written_by
from tests.tiny_models import save_tiny_model

ROWS = '{"input": "a"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", hidden=64)


def finished_run(path, model, scheme="w4a16", drawn=8, episode=1, step=4, rows=8, **flags):
    """A run of two episodes of 8 prompts that ended after its last step; what it was made of, as arguments for its resume."""
    (path / "prompts.jsonl").write_text(ROWS * rows)
    places = {"ckpt__output_dir": str(path / "model"), "ckpt__path": str(path), "metrics__dir": str(path)}
    given = {"train__async_enable": False, "train__enable_ema": False, "quant__scheme": scheme, **places}
    had = with_prompts(path, model, path / "prompts.jsonl", 8, **given)
    facts = written_by(had) | {"prompts": {"drawn": drawn, "episode": episode}}
    made = make(path / "_actor", f"global_step{step}", facts=facts)
    export = path / "model" / f"quantized-{scheme.removesuffix(':rollout').replace(':', '-')}"
    export.mkdir(parents=True)
    for file in Path(model).iterdir():
        (path / "model" / file.name).write_bytes(file.read_bytes())
    (path / "model" / "tokenizer_config.json").write_text("{}")
    (export / ".qarl-export").write_text(scheme)
    (path / "report.txt").write_text("a table")
    os.utime(made / "checkpoint.json", (1e9, 1e9))
    return with_prompts(path, model, path / "prompts.jsonl", 8, **given | flags)


def told(args) -> str | None:
    choose_checkpoint(args)
    return already_finished(args)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16:g32:rollout", "bf16"])
@pytest.mark.parametrize("drawn, episode, rows, more", [(8, 1, 8, True), (8, 1, 99, True), (8, 2, 8, False), (6, 1, 6, False)])
def test_a_run_with_nothing_left_is_told_with_what_would_train_on(tmp_path, model, scheme, drawn, episode, rows, more):
    """The last checkpoint is written before the loader is found empty, or after."""
    args = finished_run(tmp_path, model, scheme, drawn, episode, rows=rows)
    also = " or --data.max_samples" if more else ""
    assert told(args) == f"{tmp_path} is complete: step 4 of 4; to train on, give a larger --train.num_episodes{also}"


@pytest.mark.parametrize(
    "flags",
    [
        {"train__num_episodes": 3},
        {"data__max_samples": 20},
        {"train__async_enable": True},
        {"train__enable_ema": True},
        {"train__seed": 7},
        {"ckpt__load_enable": False},
        {"ckpt__output_dir": "/tmp/no/such/place"},
        {"metrics__dir": "/tmp/no/such/place"},
        {"actor__lr_scheduler": "constant", "train__num_episodes": 3},
    ],
)
def test_other_flags_go_on_as_ever(tmp_path, model, flags):
    assert told(finished_run(tmp_path, model, rows=99, **flags)) is None


@pytest.mark.parametrize("position", [(7, 1), (8, 0), (0, 1)])
def test_prompts_that_are_left_are_trained_on(tmp_path, model, position):
    assert told(finished_run(tmp_path, model, drawn=position[0], episode=position[1])) is None


FILES = ["model/model.safetensors", "model/config.json", "model/tokenizer_config.json", "model/quantized-w4a16/.qarl-export", "report.txt"]


@pytest.mark.parametrize(
    "scheme, name, how",
    [
        (scheme, name, how)
        for scheme in ("w4a16", "bf16")
        for name in FILES
        for how in ("missing", "of an earlier run", "cut short")
        # A BF16 run has no export. An export appears whole, and so did everything that a report comes after.
        if not (scheme == "bf16" and "quantized" in name) and not (how == "cut short" and name in FILES[3:])
    ],
)
def test_what_a_run_had_not_written_when_it_was_killed_is_written_by_a_resume(tmp_path, model, scheme, name, how):
    args = finished_run(tmp_path, model, scheme)
    file = tmp_path / name
    if how == "missing":
        file.unlink()
    elif how == "of an earlier run":
        os.utime(file, (1e9 - 1, 1e9 - 1))
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert told(args) is None


def test_a_checkpoint_that_is_not_the_newest_is_gone_back_to(tmp_path, model):
    args = finished_run(tmp_path, model)
    (tmp_path / "longer").mkdir()
    finished_run(tmp_path / "longer", model, step=6)
    os.rename(tmp_path / "longer" / "_actor" / "global_step6", tmp_path / "_actor" / "global_step6")
    args.ckpt.load_tag = "global_step4"
    assert told(args) is None


@pytest.mark.parametrize("lacks", ["prompts", "flags"])
def test_an_older_checkpoint_does_not_say_enough(tmp_path, model, lacks):
    args = finished_run(tmp_path, model)
    facts = {key: value for key, value in (written_by(args) | {"prompts": {"drawn": 8, "episode": 1}}).items() if key != lacks}
    make(tmp_path / "_actor", "global_step5", facts=facts)
    assert told(args) is None


@pytest.mark.parametrize("complete", [True, False])
def test_the_command_ends_there(tmp_path, model, monkeypatch, capsys, complete):
    args = finished_run(tmp_path, model)
    monkeypatch.setattr(train_qarl, "resolve", lambda argv: (args, [], None))
    args.dry_run = args.dry_run_all = False
    args.device, args.ray = "cpu", type("Ray", (), {"log_to_driver": False})
    monkeypatch.setattr(train_qarl.placement, "check_placement", lambda args: None)
    monkeypatch.setattr(train_qarl.positions, "check_positions", lambda args: None)
    for name in ("check_heads", "preflight", "main_memory_problems", "long_prompts", "offload_notes"):
        monkeypatch.setattr(train_qarl, name, lambda args: [])
    monkeypatch.setattr(train_qarl.positions, "apply", lambda args: None)
    monkeypatch.setattr(train_qarl.runtime, "set_environment", lambda device: {})
    started = []
    monkeypatch.setattr(train_qarl, "run", lambda *arguments: started.append(1))
    if not complete:
        (tmp_path / "report.txt").unlink()
    train_qarl.main([])
    last = capsys.readouterr().out.splitlines()[-1]
    assert started == ([] if complete else [1]) and (f"{tmp_path} is complete: step 4 of 4" in last) == complete
