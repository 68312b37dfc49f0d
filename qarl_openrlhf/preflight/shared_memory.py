"""/dev/shm: one that is too small kills an engine with a bus error in the middle of a step, which says nothing.

Measured on a CPU with vLLM 0.29 (bytes that were touched; its ring buffers are sparse files of up to 252 MB): an engine of one
rank 12 KB, one of two ranks 8.6 MB, of which 4,194,560 a rank are vLLM's shared-memory collectives. Ray's object store is not
counted: where there is no room for it, it lies on disk. NCCL's part is doctor's to check.
"""

import os
from pathlib import Path

from qarl_openrlhf.config import ConfigError

MIB = 2**20
DIRECTORY = "/dev/shm"
BASE = 1 * MIB  # semaphores of every process
A_RANK = 5 * MIB  # of an engine with several
MESSAGES = 10 * MIB  # between an engine and its ranks; they grow with the batch


def present(directory: str = DIRECTORY) -> int:
    """Bytes that are free in ``directory``; 0 if it does not exist."""
    if not os.path.isdir(directory):
        return 0
    free = os.statvfs(directory)
    return free.f_bavail * free.f_frsize


def needed(engines: int, ranks: int) -> int:
    """Bytes that a run with so many engines of so many ranks takes, all on one host."""
    return BASE + (engines * (MESSAGES + ranks * A_RANK) if ranks > 1 else 0)


def check_shared_memory(args, directory: str = DIRECTORY) -> None:
    """ConfigError naming the bytes that are needed and those that are there. Not on a cluster, whose other hosts are not seen."""
    if os.environ.get("RAY_ADDRESS"):
        return
    engines, ranks = args.vllm.num_engines, args.vllm.tensor_parallel_size
    need, free = needed(engines, ranks), present(directory)
    if free >= need:
        return
    fewer = ", or use fewer --vllm.num_engines or --vllm.tensor_parallel_size 1" if ranks > 1 else ""
    raise ConfigError(
        f"{directory} has {free:,} bytes free, and this run needs {need:,} ({engines} engines of {ranks} ranks): give it more "
        f"(docker run --shm-size 1g or --ipc host; mount -o remount,size=1G {directory}), remove what lies in it{fewer}"
    )


def object_store(directory: str = DIRECTORY, *, smallest: int, largest: int, on_disk: str) -> tuple[int, str | None]:
    """(bytes of Ray's object store, its directory or None for Ray's own choice, /dev/shm).

    Half of what is free, so that the engines keep the other half. Below twice the smallest store that Ray takes it goes to
    ``on_disk``: Ray itself would fill /dev/shm to the last byte.
    """
    free = present(directory)
    if free < 2 * smallest:
        Path(on_disk).mkdir(parents=True, exist_ok=True)
        print(f"note: Ray's object store is in {on_disk}: {directory} has {free:,} bytes free (docker run --shm-size 1g)")
        return smallest, on_disk
    return min(free // 2, largest), None
