"""The file of chosen block sizes: in the user's Triton cache, and no reason for a run to end."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from qarl_openrlhf.kernels import tune
from qarl_openrlhf.kernels.tune import Config, Tuner, tuned

CANDIDATES = [Config((64, 64), 4, 3), Config((128, 64), 8, 4)]


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    """A process that has tuned nothing yet, on a pretended card whose fastest candidate is the second."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test Card")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tune, "INTERPRETED", False)
    timed = []
    monkeypatch.setattr(tune, "_time", lambda launch, config: timed.append(config) or -config.warps)
    for name, value in (("directory", tmp_path / "cache" / "qarl_openrlhf"), ("choices", {}), ("path", None), ("writable", True)):
        monkeypatch.setattr(Tuner, name, value)

    def choose(family: tuple = ("bf16", 64)) -> tuple[Config, int]:
        """(the choice, candidates timed for it), as a process does that has just started."""
        Tuner.choices, Tuner.path = {}, None
        timed.clear()
        return tuned("kernel", family, CANDIDATES, lambda config: None), len(timed)

    return choose


def test_a_choice_is_remembered(tuner):
    assert tuner() == (CANDIDATES[1], 2)
    assert tuner() == (CANDIDATES[1], 0)
    assert [path.name.split("-triton")[0] for path in Tuner.directory.iterdir()] == ["autotune-Test-Card"]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": 1}', b'{"a": {"sizes": 3}}', b'{"a": {"warps": 4}}'])
def test_a_broken_file_counts_as_none_and_is_replaced(tuner, text):
    tuner()
    (path,) = Tuner.directory.iterdir()
    path.write_bytes(text)
    assert tuner() == (CANDIDATES[1], 2)
    assert len(json.loads(path.read_text())) == 1


def test_ranks_that_tune_side_by_side_keep_each_others_choices(tuner):
    tuner(("bf16", 64))
    Tuner.choices = {}  # a rank that had started before there was a file
    tuned("kernel", ("bf16", 128), CANDIDATES, lambda config: None)
    assert tuner(("bf16", 64))[1] == tuner(("bf16", 128))[1] == 0


def test_a_disk_that_fills_up_leaves_no_pieces(tuner, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    assert tuner() == (CANDIDATES[1], 2) and "No space left" in caplog.text
    assert not list(Tuner.directory.iterdir())


def test_a_directory_of_another_user_is_not_needed(tuner, monkeypatch, caplog):
    """Tests may run as root, to whom nothing is forbidden."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with caplog.at_level(logging.WARNING):
        assert tuner() == (CANDIDATES[1], 2)
        assert tuner(("bf16", 128)) == (CANDIDATES[1], 2)
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text and str(Tuner.directory) in caplog.text


def test_a_place_that_is_no_directory(tuner, caplog):
    Tuner.directory.parent.mkdir()
    Tuner.directory.write_text("a file")
    assert tuner() == (CANDIDATES[1], 2) and len(caplog.records) == 1


@pytest.mark.parametrize("set_to", ["{tmp}/triton_cache", None])
def test_it_lies_in_tritons_cache(set_to, tmp_path):
    """Not beside it: on a shared host /tmp/triton_cache is one user's, and /tmp/qarl_openrlhf whoever came first's."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"} | {"HOME": str(tmp_path)}
    where = tmp_path / ".triton" / "cache"
    if set_to:
        where = Path(set_to.format(tmp=tmp_path))
        environment["TRITON_CACHE_DIR"] = str(where)
    code = "from qarl_openrlhf.kernels.tune import Tuner; print(Tuner.directory)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(where / "qarl_openrlhf"), done.stderr
