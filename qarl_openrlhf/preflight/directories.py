"""Directories that the run writes to: they can be made and written, hold no model that the run reads, and belong to one run."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from qarl_openrlhf.config import ConfigError

LOCK = ".lock"
DEEPEST = 200  # characters of the longest path below a run's directory, with some to spare: _actor/TAG/FILE


def check_directories(args) -> None:
    """ConfigError for a directory that is a file or a model's, or that cannot be written; nothing is left behind."""
    models = {f"{role}.model_name_or_path": getattr(args, role).model_name_or_path for role in ("actor", "critic", "reward")}
    for flag, path in _written(args).items():
        if not path:
            raise ConfigError(f"--{flag} is empty: name a directory")
        for model_flag, model in models.items():
            if model and os.path.isdir(model) and os.path.realpath(model) == os.path.realpath(path):
                raise ConfigError(f"--{flag} {path} is the directory of --{model_flag}, which the run would overwrite: name another")
        existing = os.path.abspath(path)
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing):
            raise ConfigError(f"--{flag} {path}: {existing} is not a directory: name another")
        try:
            _try_names(existing, path)
        except OSError as error:
            raise ConfigError(f"--{flag} {path}: cannot be made in {existing} ({error.strerror}): name another directory") from None
        try:
            # Permissions do not tell: a file system may be read-only or full.
            with tempfile.TemporaryDirectory(prefix=".qarl-", dir=existing):
                pass
        except OSError as error:
            raise ConfigError(f"--{flag} {path}: cannot write to {existing} ({error.strerror}): name another directory") from None


def _try_names(existing: str, path: str) -> None:
    """OSError unless the file system has room for the names of ``path`` and of what a run puts there."""
    missing = os.path.relpath(os.path.abspath(path), existing).split(os.sep)
    # One name is only judged where its parent exists, the whole path anywhere.
    for place in (*missing, os.path.join(*missing, *["x" * 50] * (DEEPEST // 50))):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(os.path.join(existing, place))


def _written(args) -> dict[str, str]:
    return {"metrics.dir": args.metrics.dir, "ckpt.output_dir": args.ckpt.output_dir, "ckpt.path": args.ckpt.path}


@contextmanager
def held(args) -> Iterator[None]:
    """The run's directories are its own within; ConfigError naming the process whose they are already.

    A lock of the kernel's on a file in each: however a run ends, its directories are free again.
    """
    with ExitStack() as locks:
        seen = set()
        for flag, path in _written(args).items():
            if os.path.realpath(path) in seen:
                continue
            seen.add(os.path.realpath(path))
            locks.callback(_remove_empty, path, _missing(path))
            os.makedirs(path, exist_ok=True)
            file = locks.enter_context(open(os.path.join(path, LOCK), "a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ConfigError(f"--{flag} {path}: {holder} is writing a run there: wait for its end, or name another") from None
            except OSError:  # a file system without locks
                continue
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
        yield


def _missing(path: str) -> list[str]:
    """The directories that have to be made for ``path``, innermost first."""
    found, path = [], os.path.abspath(path)
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _remove_empty(path: str, made: list[str]) -> None:
    """A run that wrote nothing leaves nothing: neither the lock's file, where it is ours, nor the directories made for it."""
    with suppress(OSError):
        if not made or os.listdir(path) != [LOCK]:
            return
        os.unlink(os.path.join(path, LOCK))
        for directory in made:
            os.rmdir(directory)
