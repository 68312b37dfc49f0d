"""cli.export: every source, target and flag that cannot work is one line that says so, and nothing is written."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl_openrlhf.cli import evaluate, export
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Path(save_tiny_model(tmp_path_factory.mktemp("base"), "qwen2", tied=True))


@pytest.fixture
def source(base, tmp_path):
    return Path(shutil.copytree(base, tmp_path / "source"))


def refused(*argv) -> str:
    with pytest.raises(SystemExit) as error:
        export.main(list(map(str, argv)))
    message = str(error.value)
    assert message.startswith("export: error: ") and "\n" not in message
    return message


def edit_config(source: Path, **values):
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_weights(source: Path, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def spoil_tensor(source: Path, name: str, value: float):
    edit_weights(source, lambda tensors: tensors[name].view(-1)[-1].fill_(value))


def cut(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BROKEN = {
    "cut off": (cut, "source cannot be loaded: SafetensorError"),
    "no weights": (lambda s: (s / "model.safetensors").unlink(), "source cannot be loaded: .*no file named model.safetensors"),
    "empty weights": (lambda s: (s / "model.safetensors").write_bytes(b""), "source cannot be loaded"),
    "a weight missing": (lambda s: edit_weights(s, lambda t: t.pop("model.norm.weight")), "lacks 1 weights of its model, one is model.norm.weight"),
    "other shapes": (lambda s: edit_config(s, vocab_size=77), r"model.embed_tokens.weight is \[.*\] in its files, \[77, .*\] by its config.json"),
    "config cut off": (lambda s: (s / "config.json").write_text('{"model_type"'), "no config.json that transformers reads"),
    "config a list": (lambda s: (s / "config.json").write_text("[]"), "no config.json that transformers reads"),
    "config empty": (lambda s: (s / "config.json").write_text("{}"), "no config.json that transformers reads"),
    "unknown model": (lambda s: edit_config(s, model_type="nonesuch"), "no config.json that transformers reads"),
    "wrong kind": (lambda s: edit_config(s, hidden_size="wide"), "no config.json that|cannot be loaded"),
}


@pytest.mark.parametrize("spoil, message", BROKEN.values(), ids=BROKEN)
def test_a_broken_source(source, tmp_path, spoil, message):
    spoil(source)
    assert re.search(message, refused(source, "--out", tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


SPOILED = {
    "model.norm.weight": float("nan"),
    "model.embed_tokens.weight": float("inf"),
    "model.layers.0.self_attn.q_proj.bias": float("-inf"),
    "model.layers.1.mlp.down_proj.weight": float("nan"),
}


@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
@pytest.mark.parametrize("name", SPOILED)
def test_nan_and_infinity_are_refused_in_every_kind_of_tensor(source, tmp_path, name, scheme):
    spoil_tensor(source, name, SPOILED[name])
    message = refused(source, "--out", tmp_path / "out", "--scheme", scheme)
    assert name.removesuffix(".weight") in message and re.search("NaN or infinite", message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_evaluation_refuses_them_too_and_names_the_file(source, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    words = [str(source), "--out", str(tmp_path / "out"), "--tasks", str(tmp_path / "sums.jsonl"), "--max_tokens", "8"]
    for name, value in SPOILED.items():
        spoil_tensor(source, name, value)
        for scheme in ([], ["--scheme", "w8a8"]):
            with pytest.raises(SystemExit) as error:
                evaluate.main([*words, *scheme])
            assert re.fullmatch(rf"evaluate: error: {source}/model.safetensors: {name}: 1 of \d+ values are NaN or infinite: .*", str(error.value))
        assert not (tmp_path / "out").exists()
        spoil_tensor(source, name, 0.0)


def test_broken_deepspeed_files(base, tmp_path):
    step = tmp_path / "ckpt" / "_actor" / "global_step1"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text("global_step1")
    for content in (b"", b"junk", None):
        path = step / "mp_rank_00_model_states.pt"
        path.write_bytes(content) if content is not None else torch.save({"other": 1}, path)
        assert "is broken, or not DeepSpeed's" in refused(tmp_path / "ckpt", "--model", base, "--out", tmp_path / "out")
    assert "choose one with --tag" in refused(tmp_path / "ckpt", "--model", base, "--tag", "x", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "words, message",
    [
        (["/no/such"], "/no/such does not exist"),
        (["./no_such"], "./no_such does not exist"),
        (["BASE", "--tag", "global_step1"], "--tag global_step1 chooses a DeepSpeed checkpoint"),
        (["BASE", "--scheme", "w8a8", "--skip", "nosuchlayer"], "--skip nosuchlayer is no layer of"),
        (["BASE", "--scheme", "w8a8", "--skip", "*.q_proj", "*.q_prj"], "--skip *.q_prj is no layer of"),
        (["BASE", "--tp", "0"], "--tp 0: give 1 or more"),
        (["BASE", "--tolerance", "nan"], "--tolerance nan"),
        (["BASE", "--out", "/proc/x/y"], "nothing can be written to /proc"),
        (["BASE", "--out", "TMP/file"], "is a file: name a directory"),
        (["BASE", "--out", "TMP/file/below"], "is not a directory"),
        (["BASE", "--out", "BASE/.."], "contains the source"),
    ],
)
def test_what_cannot_be_exported(base, tmp_path, words, message):
    (tmp_path / "file").write_text("x")
    words = [word.replace("BASE", str(base)).replace("TMP", str(tmp_path)) for word in words]
    assert message in refused("--out", tmp_path / "out", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_source_without_a_tokenizer_is_said(source, tmp_path, capsys):
    export.main([str(source), "--out", str(tmp_path / "with"), "--scheme", "w8a8", "--skip", "*.layers.0.*"])
    assert "note" not in capsys.readouterr().out
    for path in source.glob("tokenizer*"):
        path.write_text("{")
    export.main([str(source), "--out", str(tmp_path / "broken")])
    for path in source.glob("tokenizer*"):
        path.unlink()
    export.main([str(source), "--out", str(tmp_path / "without")])
    assert capsys.readouterr().out.count("source has no tokenizer that could be read") == 2
    assert not list(tmp_path.glob("without/tokenizer*"))
