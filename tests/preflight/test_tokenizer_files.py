"""A tokenizer that is missing or broken is one line that names the file and what mends it, wherever a tokenizer is loaded."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.cli import evaluate
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.tokenizer_files import endless, load_tokenizer
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("saved"), "llama")


@pytest.fixture
def model(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def write(name: str, text: str | bytes):
    return lambda model: (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def remove(*names: str):
    return lambda model: [(model / name).unlink(missing_ok=True) for name in names]


def cut(model: Path):
    path = model / "tokenizer.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def gone(model: Path):
    for path in model.glob("*token*"):
        path.unlink()


MISSING = r"has no tokenizer.json \(nor tokenizer.model, .*\): copy the tokenizer's files from the model it came from"
BROKEN = r"has a broken {} \(.+\): download it again"
SPOILED = {
    "no file": (gone, MISSING),
    "no vocabulary": (remove("tokenizer.json"), MISSING),
    "cut off": (cut, BROKEN.format("tokenizer.json")),
    "empty": (write("tokenizer.json", ""), BROKEN.format("tokenizer.json")),
    "no object": (write("tokenizer.json", "[]"), BROKEN.format("tokenizer.json")),
    "null": (write("tokenizer.json", "null"), BROKEN.format("tokenizer.json")),
    "empty object": (write("tokenizer.json", "{}"), BROKEN.format("tokenizer.json")),
    "no UTF-8": (write("tokenizer.json", b"\xff\xfe"), BROKEN.format("tokenizer.json")),
    "a page": (write("tokenizer.json", "<html>"), BROKEN.format("tokenizer.json")),
    "a pointer": (write("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), BROKEN.format("tokenizer.json")),
    "config broken": (write("tokenizer_config.json", "{"), BROKEN.format("tokenizer_config.json")),
    "config a list": (write("tokenizer_config.json", "[]"), BROKEN.format("tokenizer_config.json")),
    "config null": (write("tokenizer_config.json", "null"), BROKEN.format("tokenizer_config.json")),
}


@pytest.mark.parametrize("spoil, message", SPOILED.values(), ids=SPOILED)
def test_one_line_names_the_file(model, tmp_path, spoil, message):
    assert load_tokenizer("own", str(model)).vocab_size
    spoil(model)
    with pytest.raises(ConfigError) as error:
        load_tokenizer(f"--flag {model}", str(model))
    assert re.fullmatch(f"--flag {model} {message}", str(error.value))  # a dot is no newline
    (tmp_path / "sums.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    for chat in ("auto", "on", "off"):
        with pytest.raises(SystemExit) as ended:
            evaluate.main([str(model), "--out", str(tmp_path / "out"), "--tasks", str(tmp_path / "sums.jsonl"), "--max_tokens", "8", "--chat", chat])
        assert re.fullmatch(f"evaluate: error: {model} {message}", str(ended.value))
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_no_directory_is_one_line_too(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"^M has a tokenizer that does not load \(\w+: .*\): copy ") as error:
        load_tokenizer("M", "owner/no-such-model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ends", ["tokenizer_config.json", "config.json", "generation_config.json", "--rollout.stop", None])
def test_a_model_whose_responses_nothing_ends_is_noted(model, ends):
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path = model / name
        content = json.loads(path.read_text()) if path.is_file() else {}
        for key in ("eos_token", "eos_token_id"):
            content.pop(key, None)
        if name == ends:
            content |= {"eos_token": "<|im_end|>"} if name.startswith("tokenizer") else {"eos_token_id": [2]}
        path.write_text(json.dumps(content | ({"eos_token_id": None} if name == "config.json" != ends else {})))
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    notes = endless(N(actor=N(model_name_or_path=str(model)), rollout=N(stop=["x"] if ends == "--rollout.stop" else [])))
    assert len(notes) == (ends is None)
    assert ends or "no end-of-sequence token, so that no response ends by itself" in notes[0]
