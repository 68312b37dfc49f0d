"""/dev/shm: where it is too small, an engine of several ranks does not start, and only a worker's log says why.

vLLM makes ring buffers between an engine and its ranks, sparse files of up to 252 MB, and refuses to if that is not free; on a
CPU each rank also fills 4 MB a thread for its collectives. An engine of one rank takes 12 KB (measured, vLLM 0.29). Ray's
object store is not counted: where there is no room for it, it lies on disk. NCCL's part is doctor's to check.
"""

import os
from pathlib import Path

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.runtime import available_cpus

MIB = 2**20
DIRECTORY = "/dev/shm"
BASE = 1 * MIB  # semaphores of every process
RING = 252_000_000  # of an engine of several ranks; must be free, though little of it is ever touched
A_THREAD = 4_194_560  # of each rank of such an engine on a CPU
TOUCHED = 1 * MIB  # of its ring buffers


def present(directory: str = DIRECTORY) -> int:
    """Bytes that are free in ``directory``; 0 if it does not exist."""
    if not os.path.isdir(directory):
        return 0
    free = os.statvfs(directory)
    return free.f_bavail * free.f_frsize


def needed(engines: int, ranks: int, threads: int = 0) -> int:
    """Bytes that so many engines of so many ranks need, all on one host. threads: of each rank on a CPU; 0 on GPUs."""
    return BASE if ranks == 1 else BASE + RING + engines * (TOUCHED + ranks * threads * A_THREAD)


def check_shared_memory(args, directory: str = DIRECTORY) -> None:
    """ConfigError naming the bytes that are needed and there. Not on a cluster, whose other hosts are not seen."""
    if os.environ.get("RAY_ADDRESS"):
        return
    engines, ranks = args.vllm.num_engines, args.vllm.tensor_parallel_size
    threads = int(os.environ.get("OMP_NUM_THREADS") or available_cpus()) if args.device == "cpu" else 0
    need, free = needed(engines, ranks, threads), present(directory)
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
