"""Write a checkpoint so that a process killed at any moment leaves whole ones only, under their own names."""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.checkpoint.errors import CheckpointError
from qarl_openrlhf.checkpoint.find import finish_partial, tags
from qarl_openrlhf.checkpoint.state import rank_file
from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.planning.disk import size, why_not_written


def write_checkpoint(engine, directory: str | Path, tag: str, *, client_state: dict, rank_state: dict, facts: dict) -> None:
    """All ranks call this. DeepSpeed's files and each rank's ``rank_state`` under a name of its own, checksummed, then renamed.

    Args:
        engine: ``DeepSpeedEngine``; client_state: what DeepSpeed keeps with it; rank_state: anything ``torch.save`` takes.
        facts: for the manifest, see ``facts``.

    Raises:
        CheckpointError: on the rank that cannot write, at once: the others wait in DeepSpeed and end with the run.
    """
    directory = Path(directory)
    partial = directory / f"{tag}{manifest.PARTIAL}"
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        if rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            remove_partial(directory)
            _check_space(directory, engine)
            partial.mkdir()
        dist.barrier()
        engine.save_checkpoint(str(directory), tag=partial.name, client_state=client_state, save_latest=False)
        torch.save(rank_state, rank_file(partial, rank))
        dist.barrier()
        names = manifest.files_of(partial)
        described: list = [None] * world
        dist.all_gather_object(described, manifest.describe(partial, names[rank::world], sync=True))
        if rank == 0:
            manifest.write(partial, {name: entry for part in described for name, entry in part.items()}, facts)
            _take_place(partial, directory / tag)
            with atomic_file(directory / "latest") as latest:  # for DeepSpeed's own tools
                latest.write_text(tag, encoding="utf-8")
    except CheckpointError:
        raise
    except Exception as error:  # PyTorch's writer turns a full disk into a RuntimeError, DeepSpeed's into others
        reason = why_not_written(error, directory, "ckpt.path")
        if world == 1:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {directory / tag} could not be written: {reason}") from error
    dist.barrier()


def remove_partial(directory: Path) -> None:
    """Remove what an interrupted write or removal has left, but for a checkpoint that only lacks its name."""
    finish_partial(directory)
    for left in directory.glob(f"*{manifest.PARTIAL}"):
        shutil.rmtree(left)


def rotate_together(directories: Iterable[Path], written: str, **how) -> list[Path]:
    """:func:`rotate` each of a run's models, once all of them hold ``written``: until then the one before it is the newest that a
    resume can take. The last model to finish does it for all; where two finish at once, each removes what the other has left.
    """
    directories = list(directories)
    if any(manifest.read(directory / written) is None for directory in directories):
        return []
    return [directory / tag for directory in directories for tag in rotate(directory, written, **how)]


def rotate(directory: Path, written: str, *, keep: int, max_gb: float, metric: Callable[[str], float | None]) -> list[str]:
    """Remove checkpoints beyond ``keep`` and ``max_gb`` (GiB), never the one just ``written``; returns what was removed.

    OpenRLHF's order: one "best" checkpoint stays besides; of the others go first those without a metric, then those with the
    worst, then the oldest. It made room before it wrote, which for a moment left one checkpoint less than asked for.
    """
    removed = []
    if written.startswith("best"):
        removed = [tag for tag in tags(directory) if tag.startswith("best") and tag != written]
    regular = [tag for tag in tags(directory) if not tag.startswith("best")]
    order = sorted(
        reversed(regular),  # oldest first; sorted() keeps that order among equals
        key=lambda tag: (metric(str(directory / tag)) is not None, metric(str(directory / tag)) or 0.0),
    )
    order = [tag for tag in order if tag != written]
    sizes = {tag: _size(directory / tag) for tag in tags(directory)}
    left = dict(sizes)
    for tag in removed:
        left.pop(tag)
    while order and (sum(tag in left for tag in regular) > keep or sum(left.values()) > max_gb * 2**30):
        left.pop(order[0])
        removed.append(order.pop(0))
    return [tag for tag in removed if _remove(directory / tag)]


def _take_place(partial: Path, final: Path) -> None:
    """Rename; a checkpoint of that name, of a run whose last steps are being repeated, makes way."""
    earlier = _set_aside(final) if final.exists() else None
    try:
        os.replace(partial, final)
    except FileNotFoundError:
        if not final.exists():  # else a run that is about to be refused the directory has looked for checkpoints just now
            raise
    _sync_directory(final.parent)
    if earlier:
        shutil.rmtree(earlier)


def _remove(checkpoint: Path) -> bool:
    """False if another process has taken it."""
    try:
        shutil.rmtree(_set_aside(checkpoint), ignore_errors=True)  # two may be at it, and the next write tries again
    except FileNotFoundError:
        return False
    return True


def _set_aside(directory: Path) -> Path:
    """Give a checkpoint a name that no reader looks at, so that a kill in the middle of its removal leaves no torn one."""
    going = directory.with_name(f"{directory.name}.old{manifest.PARTIAL}")
    shutil.rmtree(going, ignore_errors=True)
    os.replace(directory, going)
    return going


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(directory: Path) -> int:
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # another model's process removes it
                size += os.path.getsize(os.path.join(folder, name))
    return size


def _check_space(directory: Path, engine) -> None:
    """CheckpointError before the disk is full of half a checkpoint."""
    earlier = tags(directory)
    # Weights, and in float32 a master copy and Adam's two moments. ZeRO-3 leaves an empty parameter that knows its size.
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    needed = _size(directory / earlier[0]) if earlier else elements * 14
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"no room for a checkpoint in {directory}: {size(free)} are free, it takes about {size(needed)}. "
            "Free some or name another disk with --ckpt.path; --ckpt.max_num N keeps fewer"
        )
