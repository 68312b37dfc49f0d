"""Ranks of a group on this host, each a process.

They are forked from a server that imports once what they need: a process of its own takes 8 s for DeepSpeed, vLLM and OpenRLHF.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from qarl_openrlhf.runtime import free_port

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["qarl_openrlhf.actors.quant_actor", "tests.actors.conftest"])
# One thread: the ranks share the cores.
ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Ranks:
    """``main(rank, world, *args)`` in ``world`` processes, started at once.

    main: a function of a module. The variables that DeepSpeed and PyTorch read when they make a group are set.
    """

    def __init__(self, main: Callable, world: int, *args):
        group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment = os.environ | ENVIRONMENT | group
        self.logs = [tempfile.NamedTemporaryFile(mode="r", suffix=f".rank{rank}") for rank in range(world)]  # noqa: SIM115
        self.processes = [
            SERVER.Process(target=_rank, args=(main, rank, world, args, environment, log.name)) for rank, log in enumerate(self.logs)
        ]
        here = os.getcwd()
        os.chdir(ROOT)  # the server finds this package's modules where it is started
        try:
            for process in self.processes:
                process.start()
        finally:
            os.chdir(here)

    def wait(self, seconds: float = 500) -> None:
        """AssertionError with the ends of what they printed, if one fails or is not done in time: all are ended then."""
        until = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
            ends = [process.exitcode for process in self.processes]
            assert ends == [0] * len(ends), f"{ends}\n" + "\n".join(log.read()[-3000:] for log in self.logs)
        finally:
            for process, log in zip(self.processes, self.logs, strict=True):
                process.kill()
                log.close()


def _rank(main: Callable, rank: int, world: int, args: tuple, environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.environ.clear()
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    main(rank, world, *args)
    sys.stdout.flush()
