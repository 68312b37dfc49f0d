"""Writers of one file at the same time: threads of a process, and processes."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from qarl_openrlhf import files
from qarl_openrlhf.files import atomic_directory, atomic_file, let_umask_rule, scratch_directory

SIZE = 200_000
WRITE = """
import sys
from qarl_openrlhf.files import atomic_file
for _ in range(100):
    with atomic_file(sys.argv[1]) as part:
        part.write_text(sys.argv[2] * 200_000)
"""


def test_threads_that_write_one_file(tmp_path):
    path = tmp_path / "summary.csv"

    def write(letter):
        for _ in range(50):
            with atomic_file(path) as part:
                part.write_text(letter * SIZE)
            assert (text := path.read_text()) == text[0] * SIZE

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    assert [p.name for p in tmp_path.iterdir()] == ["summary.csv"]


def test_processes_that_write_one_file(tmp_path):
    path = tmp_path / "summary.csv"
    path.write_text("c" * SIZE)
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(path), letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        assert (text := path.read_text()) == text[0] * SIZE
    assert [writer.returncode for writer in writers] == [0, 0] and [p.name for p in tmp_path.iterdir()] == ["summary.csv"]


def test_an_error_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("before")
    for atomic, name in ((atomic_file, "file"), (atomic_directory, "directory")):
        with pytest.raises(KeyError), atomic(tmp_path / name) as part:
            (part if name == "file" else part / "x").write_text("half")
            raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"


def test_of_two_writers_of_a_directory_one_is_refused(tmp_path):
    with pytest.raises(OSError), atomic_directory(tmp_path / "model") as first:
        (first / "x").write_text("first")
        with atomic_directory(tmp_path / "model") as second:
            (second / "x").write_text("second")
    assert [p.name for p in tmp_path.iterdir()] == ["model"] and (tmp_path / "model" / "x").read_text() == "second"


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path):
    old, new, other = (tmp_path / name for name in (".a.json.partdead", ".a.json.partlive", ".b.json.partdead"))
    for path in (old, new, other):
        path.write_text("")
    folder = tmp_path / ".a.json.partdir"
    folder.mkdir()
    (folder / "x").write_text("")
    for path in (old, other, folder):
        os.utime(path, (0, 0))
    with atomic_file(tmp_path / "a.json") as part:
        part.write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, other.name, "a.json"]


HOLD = """
import sys
from qarl_openrlhf.files import scratch_directory
with scratch_directory(sys.argv[1], ".weights-") as made:
    print(made.name, flush=True)
    sys.stdin.read()
"""


def test_scratch_that_a_killed_process_left_is_removed_and_no_other(tmp_path):
    users = [tmp_path / ".weights-of-mine", tmp_path / ".weights-", tmp_path / "weights-abcdefgh"]
    for path in users:
        path.mkdir()
    (tmp_path / ".weights-12345678").write_text("a file")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed, alive = (subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **pipes) for _ in range(2))
    names = {process: process.stdout.readline().strip() for process in (killed, alive)}
    killed.kill()
    killed.wait()
    before = set(tmp_path.iterdir())
    assert {tmp_path / name for name in names.values()} < before
    with pytest.raises(KeyError), scratch_directory(tmp_path, ".weights-") as made:
        (made / "model").mkdir()
        assert set(tmp_path.iterdir()) == before - {tmp_path / names[killed]} | {made}
        raise KeyError
    alive.communicate("")
    assert set(tmp_path.iterdir()) == before - {tmp_path / name for name in names.values()}


@pytest.mark.parametrize("when", ["made", "opened"])
def test_scratch_that_another_process_removes_before_it_is_locked_is_made_anew(tmp_path, monkeypatch, when):
    swept = []

    def sweep(directory):
        """What another process does that takes it for a left one."""
        if not swept:
            swept.append(directory)
            files._remove_if_left(directory)

    make, lock = files.tempfile.mkdtemp, files.fcntl.flock

    def mkdtemp(**where):
        made = make(**where)
        if when == "made":
            sweep(files.Path(made))
        return made

    def flock(file, operation):
        if operation == files.fcntl.LOCK_EX and when == "opened":
            sweep(files.Path(os.readlink(f"/proc/self/fd/{file}")))
        lock(file, operation)

    monkeypatch.setattr(files.tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(files.fcntl, "flock", flock)
    with scratch_directory(tmp_path, ".weights-") as made:
        assert swept and made != swept[0] and list(tmp_path.iterdir()) == [made]
        files._remove_if_left(made)  # its lock is held
        assert made.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_umask_rules_what_safetensors_wrote(tmp_path, umask):
    import torch
    from safetensors.torch import save_file

    before = os.umask(umask)
    try:
        save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
        (tmp_path / "link.safetensors").symlink_to("/dev/null")  # another one's file
        let_umask_rule(tmp_path)
        with atomic_file(tmp_path / "file") as part:
            part.write_text("x")
        with atomic_directory(tmp_path / "directory"):
            pass
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir() if not path.is_symlink()}
    assert modes == {"model.safetensors": 0o666 & ~umask, "file": 0o666 & ~umask, "directory": 0o777 & ~umask}
