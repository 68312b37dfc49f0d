"""Directories that the run writes to: they can be made and written, hold no model that the run reads, and belong to one run."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.export.replace import check_target
from qarl_openrlhf.files import nearest_existing, why_unwritable
from qarl_openrlhf.planning.paths import quantized_directory
from qarl_openrlhf.quant.errors import QuantError

LOCK = ".lock"
TRIES = 100  # to lock a directory that other runs, as they end, take away
DEEPEST = 200  # characters of the longest path below a run's directory, with some to spare: _actor/TAG/FILE


def check_directories(args) -> None:
    """ConfigError for a directory that is a file or a model's, that cannot be written, or that holds, where the quantized model goes,
    files of someone else's; nothing is left behind."""
    models = {f"{role}.model_name_or_path": getattr(args, role).model_name_or_path for role in ("actor", "critic", "reward")}
    for flag, path in _written(args).items():
        if not path:
            raise ConfigError(f"--{flag} is empty: name a directory")
        for model_flag, model in models.items():
            if model and os.path.isdir(model) and os.path.realpath(model) == os.path.realpath(path):
                raise ConfigError(f"--{flag} {path} is the directory of --{model_flag}, which the run would overwrite: name another")
        try:
            _try_names(nearest_existing(path), path)
        except OSError as error:
            raise ConfigError(f"--{flag} {path}: cannot be made in {nearest_existing(path)} ({error.strerror}): name another directory") from None
        if why := why_unwritable(path):
            raise ConfigError(f"--{flag} {path}: {why}: name another directory")
    _check_export(args)


def _check_export(args) -> None:
    """Told now: the export is written, and would be refused, when the run is trained."""
    if args.quant.scheme == "bf16":
        return
    target = quantized_directory(args)
    try:
        check_target(target)
    except QuantError as error:
        what = str(error).removeprefix(f"--out {target} ")
        raise ConfigError(f"--ckpt.output_dir {args.ckpt.output_dir}: the quantized model goes to {target}, which {what}") from None


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
            file, made = _locked(flag, path)
            locks.enter_context(file)
            locks.callback(_remove_empty, path, made)  # before the lock is given back: another run may take it at once
        yield


def _locked(flag: str, path: str) -> tuple[TextIO, list[str]]:
    """(the file of ``path`` that holds the lock, the directories that were made for it)."""
    made: list[str] = []
    for _ in range(TRIES):
        made = _missing(path) or made
        try:
            os.makedirs(path, exist_ok=True)
            file = open(os.path.join(path, LOCK), "a+", encoding="utf-8")
        except FileNotFoundError:  # a run that ended took the directory away in between
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise ConfigError(f"--{flag} {path}: {holder} is writing a run there: wait for its end, or name another") from None
        except OSError:  # a file system without locks
            return file, made
        if _is_there(file):
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            return file, made
        file.close()
    raise ConfigError(f"--{flag} {path} is taken away as often as it is made: name another directory")


def _is_there(file: TextIO) -> bool:
    """Whether a file is still what its name stands for: a lock on one that was removed keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


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
