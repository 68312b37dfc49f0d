"""Directories of a run: writable, not a model's, and one run's at a time."""

import os
import subprocess
import sys
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.directories import check_directories, held

FLAGS = ["metrics.dir", "ckpt.output_dir", "ckpt.path"]


def arguments(good, flag: str = "metrics.dir", path=None) -> N:
    good = str(good)
    args = N(metrics=N(dir=good), ckpt=N(output_dir=good, path=good))
    for role in ("actor", "critic", "reward"):
        setattr(args, role, N(model_name_or_path=None))
    group, name = flag.split(".")
    setattr(getattr(args, group), name, good if path is None else str(path))
    return args


@pytest.mark.parametrize("flag", FLAGS)
def test_they_are_tried_and_left_as_they_were(tmp_path, flag):
    file = tmp_path / "file"
    file.write_text("x")
    good = tmp_path / "run" / "deep"
    check_directories(arguments(good, flag, tmp_path / "new"))
    for wrong, message in ((file, "is not a directory"), (file / "below", "is not a directory"), ("/proc/x/y", "cannot write"), ("", "is empty")):
        with pytest.raises(ConfigError, match=f"--{flag} .*{message}"):
            check_directories(arguments(good, flag, wrong))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("path", ["x" * 300, "new/deep/" + "x" * 300, "x" * 300 + "/below", "y" * 200 + ("/" + "y" * 200) * 20])
def test_names_that_no_file_system_takes(tmp_path, flag, path):
    with pytest.raises(OSError, match="File name too long"):
        os.makedirs(tmp_path / path)
    made = os.listdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"--{flag} .*: cannot be made in {tmp_path}\S* \(File name too long\): name another directory"):
        check_directories(arguments(tmp_path / "run", flag, tmp_path / path))
    assert os.listdir(tmp_path) == made
    check_directories(arguments(tmp_path / "run", flag, tmp_path / "new" / ("x" * 255)))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("role", ["actor", "critic", "reward"])
def test_no_model_that_is_read_is_overwritten(tmp_path, flag, role):
    model, link = tmp_path / "model", tmp_path / "link"
    model.mkdir()
    link.symlink_to(model)
    for path in (model, link, model / "." / ".." / "model"):
        args = arguments(tmp_path / "run", flag, path)
        getattr(args, role).model_name_or_path = str(model)
        with pytest.raises(ConfigError, match=f"--{flag} .* is the directory of --{role}.model_name_or_path"):
            check_directories(args)
    args = arguments(tmp_path / "run", flag, model / "run")  # below it is a place of its own
    getattr(args, role).model_name_or_path = str(model)
    check_directories(args)


def test_a_directory_has_one_run_at_a_time(tmp_path):
    hold = "import os, sys, time; from tests.preflight.test_directories import arguments, held\n"
    hold += f"with held(arguments({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        for flag in FLAGS:
            with pytest.raises(ConfigError, match=f"--{flag} {tmp_path}: process {other.pid} is writing a run there"):
                with held(arguments(tmp_path / "elsewhere", flag, tmp_path)):
                    pass
    finally:
        other.kill()
        other.wait()
    for _ in range(2):  # a killed one holds nothing, and a run that has ended neither
        with held(arguments(tmp_path)):
            pass
    with held(arguments(tmp_path / "new" / "deep")):
        assert (tmp_path / "new" / "deep").is_dir()
    assert not (tmp_path / "new").exists()  # nothing was written
