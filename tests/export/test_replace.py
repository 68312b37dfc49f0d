"""An export takes the place of nothing, of an empty directory or of an earlier export; all else it leaves as it is."""

import json
from pathlib import Path

import pytest
from qarl_openrlhf.export.replace import MARKER, check_target, put_in_place
from qarl_openrlhf.export.write import export_checkpoint
from qarl_openrlhf.quant import QuantError, QuantScheme
from qarl_openrlhf.quant.convert import convert_model
from tests.tiny_models import tiny

OURS = json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}})


def make(directory: Path, *names: str, config: str = OURS) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config if name == "config.json" else name)
    return directory


REPLACED = {
    "of before the marker": ["config.json", "generation_config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "vocab.json"],
    "with the marker": [MARKER, "config.json", "model.safetensors", "notes", "additional_chat_templates/a.jinja"],
}
KEPT = {
    "thesis.tex": ["thesis.tex"],
    "notes.txt": ["config.json", "model.safetensors", "notes.txt"],
    ".git": [".git/HEAD"],
    "directory _actor": ["_actor/latest"],
    "directory kept": [MARKER, "config.json", "kept/model.safetensors"],
    "model without quantization": ["model.safetensors", "tokenizer.json"],
}


@pytest.mark.parametrize("names", REPLACED.values(), ids=REPLACED)
def test_an_earlier_export_is_replaced(tmp_path, names):
    target = make(tmp_path / "out", *names)
    put_in_place(make(tmp_path / "new", "config.json"), check_target(target))
    assert [path.name for path in target.iterdir()] == ["config.json"] and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("what, names", KEPT.items(), ids=KEPT)
def test_all_else_is_left_as_it_is(tmp_path, what, names):
    target = make(tmp_path / "out", *names)
    before = {path: path.read_text() for path in target.rglob("*") if path.is_file()}
    with pytest.raises(QuantError, match=what):
        put_in_place(make(tmp_path / "new", "config.json"), target)
    assert {path: path.read_text() for path in target.rglob("*") if path.is_file()} == before


def test_a_model_of_the_same_files_is_kept(tmp_path):
    for config in ("{}", "[]", "{", '{"quantization_config": {"quant_method": "gptq"}}'):
        with pytest.raises(QuantError, match="model without quantization"):
            check_target(make(tmp_path / "model", "config.json", "model.safetensors", config=config))


def test_new_empty_and_linked_directories(tmp_path):
    (tmp_path / "empty").mkdir()
    make(tmp_path / "disk" / "old", MARKER)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "old")
    for name in ("empty", "a/new", "link"):
        target = check_target(tmp_path / name)
        target.parent.mkdir(exist_ok=True)
        put_in_place(make(tmp_path / "new", "config.json"), target)
        assert (tmp_path / name / "config.json").is_file()
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "disk" / "old" / MARKER).exists()


def test_files_and_sources_are_refused(tmp_path, monkeypatch):
    source = make(tmp_path / "parent" / "model", MARKER)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(source)
    with pytest.raises(QuantError, match="is a file"):
        check_target(tmp_path / "file")
    for out in (source, tmp_path / "link", ".", "../model"):
        with pytest.raises(QuantError, match="is the source itself"):
            check_target(out, (str(source),))
    for out in (tmp_path, source.parent, "..", "../.."):
        with pytest.raises(QuantError, match="contains the source"):
            check_target(out, ("Qwen/Qwen3-8B", str(source)))
    assert check_target("w8a8", (str(source), "Qwen/Qwen3-8B")) == source / "w8a8"  # as a training run does


def test_a_refusal_comes_before_anything_is_written(tmp_path):
    model, scheme = tiny(), QuantScheme.parse("w8a8")
    convert_model(model, scheme)
    out = make(tmp_path / "out", "thesis.tex")
    with pytest.raises(QuantError, match="thesis.tex"):
        export_checkpoint(model, model.config, str(out), scheme)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.tex"]
    export_checkpoint(model, model.config, str(tmp_path / "again"), scheme)
    export_checkpoint(model, model.config, str(tmp_path / "again"), scheme)
    assert (tmp_path / "again" / MARKER).read_text() == "w8a8\n"
