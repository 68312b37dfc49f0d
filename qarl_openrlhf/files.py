"""Writing files and directories so that a reader sees all of them or none."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator

LEFT_S = 24 * 3600


def why_unwritable(directory: str | os.PathLike) -> str | None:
    """Why `directory` (which need not exist) cannot be made and written to; None if it can. Found by trying: root may all that
    permissions forbid, and yet not write to a read-only file system."""
    here = nearest_existing(directory)
    if not here.is_dir():
        return f"{here} is not a directory"
    try:
        with tempfile.TemporaryDirectory(prefix=".qarl-", dir=here):
            return None
    except OSError as error:
        return f"nothing can be written to {here} ({error.strerror})"


def nearest_existing(path: str | os.PathLike) -> Path:
    """`path`, or the first of its parents that is there."""
    here = Path(os.path.abspath(path))
    while not os.path.lexists(here):
        here = here.parent
    return here


def _beside(path: Path) -> Path:
    """A name that no other thread, process or host of a shared file system takes. What a killed writer left a day ago goes."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.part*"):
        with suppress(OSError):
            if time.time() - old.lstat().st_mtime > LEFT_S:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    return path.with_name(f".{path.name}.part{uuid.uuid4().hex[:16]}")


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it to `path` when the block ends, removes it when the block raises."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _beside(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """As `atomic_file` for a directory. `path` must not exist, or be empty: two writers cannot mix their files."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _beside(path)
    part.mkdir()
    try:
        yield part
        os.rename(part, path)  # replaces an empty directory, refuses one with files
    finally:
        shutil.rmtree(part, ignore_errors=True)


def let_umask_rule(directory: str | os.PathLike, pattern: str = "*.safetensors") -> None:
    """Give files the mode that the process's umask (or the directory's own rule) gives a new file there.

    safetensors writes through a temporary file of Python's kind, which its owner alone may read, and leaves it so.
    """
    probe = Path(directory, f".mode{uuid.uuid4().hex[:16]}")  # asking os.umask would change it for other threads meanwhile
    opened = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(opened).st_mode)
    finally:
        os.close(opened)
        probe.unlink()
    for path in Path(directory).glob(pattern):
        if path.is_file() and not path.is_symlink():  # a link's file is another one's
            path.chmod(mode)


@contextmanager
def scratch_directory(parent: str | os.PathLike, prefix: str) -> Iterator[Path]:
    """A directory in `parent` that is removed when the block ends; first those go that killed processes left under this prefix.

    Its process holds a lock on it, which the system gives back however the process ends. Its mode is mkdtemp's, for its owner alone: what
    is to stay is written to a directory made within it.
    """
    for left in Path(parent).glob(f"{glob.escape(prefix)}*"):
        if re.fullmatch(r"[a-z0-9_]{8}", left.name.removeprefix(prefix)) and left.is_dir():  # as mkdtemp names them
            with suppress(OSError):
                _remove_if_left(left)
    made, lock = None, -1
    try:
        while made is None:
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # Until it is locked, another process may take it for a left one.
            try:
                lock = os.open(made, os.O_RDONLY)
            except FileNotFoundError:
                made = None
                continue
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                os.close(lock)
                made, lock = None, -1
        yield made
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _remove_if_left(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # a file system without locks
            if time.time() - directory.stat().st_mtime < LEFT_S:
                return
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(opened)


@contextmanager
def made_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Makes `path` and its parents; if the block raises, those that it made and that are empty go again."""
    path = Path(os.path.abspath(path))
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    except BaseException:
        with suppress(OSError):  # not empty: what was written stays, and so do its parents
            for directory in made:
                directory.rmdir()
        raise
