"""Directories of a run: writable, not a model's, and one run's at a time."""

import os
import subprocess
import sys
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight import directories
from qarl_openrlhf.preflight.directories import LOCK, check_directories, held

FLAGS = ["metrics.dir", "ckpt.output_dir", "ckpt.path"]


def arguments(good, flag: str = "metrics.dir", path=None) -> N:
    good = str(good)
    args = N(metrics=N(dir=good), ckpt=N(output_dir=good, path=good), quant=N(scheme="w4a16:g64"))
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
    for wrong, message in ((file, "is not a directory"), (file / "below", "is not a directory"), ("/proc/x/y", "nothing can be written to /proc"), ("", "is empty")):
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


@pytest.mark.parametrize("scheme, name", [("w4a16:g64", "quantized-w4a16-g64"), ("w8a8:rollout", "quantized-w8a8")])
def test_where_the_quantized_model_goes_there_is_nobody_else_s(tmp_path, scheme, name):
    args = arguments(tmp_path)
    args.quant.scheme = scheme
    target = tmp_path / name
    target.mkdir()
    check_directories(args)
    (target / ".qarl-export").write_text("an earlier export")
    check_directories(args)
    (target / "eval").mkdir()  # as of cli.evaluate --out
    message = f"--ckpt.output_dir {tmp_path}: the quantized model goes to {target}, which is no earlier export .it holds the directory eval"
    with pytest.raises(ConfigError, match=message):
        check_directories(args)
    args.quant.scheme = "bf16"
    check_directories(args)


def holder(path) -> subprocess.Popen:
    """A process that holds ``path`` until its input ends."""
    hold = "import sys; from tests.preflight.test_directories import arguments, held\n"
    hold += f"with held(arguments({str(path)!r})): print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def assert_refused(path) -> None:
    with pytest.raises(ConfigError, match="is writing a run there"), held(arguments(path)):
        pass


def test_a_run_that_wrote_nothing_tidies_while_the_directory_is_its_own(tmp_path, monkeypatch):
    path, seen = tmp_path / "new" / "run", []
    tidy = directories._remove_empty

    def remove_empty(*args):
        assert_refused(path)  # by the lock, which belongs to the file and not to the process
        seen.append(tidy(*args))

    monkeypatch.setattr(directories, "_remove_empty", remove_empty)
    with held(arguments(path)):
        assert_refused(path)
    assert len(seen) == 1 and os.listdir(tmp_path) == []


def test_a_lock_on_a_file_that_the_run_before_took_away_is_none(tmp_path, monkeypatch):
    path, lock = tmp_path / "new" / "run", directories.fcntl.flock
    before = holder(path)

    def flock(*args):
        """The other run ends between our opening of its file and our locking."""
        before.communicate("")
        assert not path.exists() or os.listdir(path) == [LOCK]
        lock(*args)

    monkeypatch.setattr(directories.fcntl, "flock", flock)
    with held(arguments(path)):
        monkeypatch.undo()
        assert os.listdir(path) == [LOCK]
        assert_refused(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("parents", [False, True])
def test_a_directory_that_the_run_before_takes_away_is_made_again(tmp_path, monkeypatch, parents):
    path, make, times = tmp_path / "new" / "run", os.makedirs, []

    def makedirs(name, **how):
        times.append(name)
        if len(times) > 1:
            return make(name, **how)
        if parents:  # gone while makedirs goes down
            raise FileNotFoundError(2, "No such file or directory", name)
        make(name, **how)
        os.removedirs(name)

    tmp_path.joinpath("kept").touch()
    monkeypatch.setattr(os, "makedirs", makedirs)
    with held(arguments(path)):
        assert_refused(path)
    assert os.listdir(tmp_path) == ["kept"]


def test_a_directory_that_is_always_gone_is_no_endless_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "makedirs", lambda *args, **how: None)
    with pytest.raises(ConfigError, match=f"--metrics.dir {tmp_path}/run is taken away as often as it is made"), held(arguments(tmp_path / "run")):
        pass


def test_a_directory_has_one_run_at_a_time(tmp_path):
    other = holder(tmp_path)
    try:
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
