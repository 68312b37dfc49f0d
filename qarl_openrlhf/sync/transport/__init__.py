"""How buckets travel: ``gloo`` (CPU), ``nccl`` (GPUs of their own), ``ipc`` (learner and engine on one GPU).

A transport is a pair of classes, one for each end:

    Sender    learner rank 0   connect() -> Future;  begin();  buffer(nbytes);  send(flat) -> Sending;  close()
    Receiver  each engine rank begin();  receive(nbytes, ticket) -> uint8 [nbytes];  close()

Each group is made from a store that the learner opens on a free port, and is thrown away after a failure: the next publish
makes a new one on a new port. The processes' default groups belong to DeepSpeed and vLLM, and are not touched.
"""

import importlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

TRANSPORTS = ("gloo", "nccl", "ipc")


@dataclass(frozen=True)
class GroupInfo:
    """Transport, where the group's store listens, how many ranks join (rank 0 is the learner), longest wait (seconds)."""

    transport: str
    host: str
    port: int
    world_size: int
    timeout_s: float

    def to_dict(self) -> dict:
        return asdict(self)


class Work(Protocol):
    """One send under way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> None:
        """Raises RuntimeError if the send failed."""


@dataclass(frozen=True)
class Sending:
    """``work``: the send itself; ``ticket``: what receivers need beside the manifest to get the bytes (picklable)."""

    work: Work
    ticket: Any = None


class Done:
    """The work of a transport that has nothing left to do once the receivers know where the bytes lie."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Staging:
    """Two device buffers that take turns: one is filled while the other is on its way. Grown to the largest bucket."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: list[Tensor | None] = [None, None]
        self.turn = 1

    def begin(self) -> None:
        """Start an update: the same bucket then lands in the same buffer every time, and neither grows any more."""
        self.turn = 1

    def next(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the buffer that was not used last; its old contents are lost."""
        self.turn ^= 1
        held = self.buffers[self.turn]
        if held is None or held.numel() < nbytes:
            self.buffers[self.turn] = held = None  # free the small one first
            self.buffers[self.turn] = held = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return held[:nbytes]

    @property
    def nbytes(self) -> int:
        return sum(b.numel() for b in self.buffers if b is not None)


class StagedSender:
    """What the senders of GPU memory share: buckets are packed in two buffers that take turns."""

    def __init__(self, info: GroupInfo, device: torch.device):
        self.info, self.device = info, device
        self.staging = Staging(device)

    def begin(self) -> None:
        self.staging.begin()

    def buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the GPU; valid until the next but one is asked for."""
        return self.staging.next(nbytes)


def backend(name: str):
    """The module of a transport; ValueError for an unknown one. Only the one in use is imported."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport {name!r} does not exist: use one of {', '.join(TRANSPORTS)}")
    return importlib.import_module(f"qarl_openrlhf.sync.transport.{name}")


def make_sender(transport: str, host: str, world_size: int, timeout_s: float, device: torch.device):
    """The learner's end; ``sender.info`` is what the receivers need to join."""
    return backend(transport).Sender(host, world_size, timeout_s, device)


def join(info: GroupInfo, rank: int, device: torch.device, address: str | None = None):
    """An engine rank's end; blocks until all are there. RuntimeError after ``info.timeout_s`` or when the sender closes.

    rank: 1 .. world_size - 1. address: of this host's interface that the others can reach.
    """
    return backend(info.transport).Receiver(info, rank, device, address)


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """The learner's store. Port 0: it binds a free port itself, so nobody can take it in between."""
    return dist.TCPStore(host, 0, None, True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(info: GroupInfo) -> dist.Store:
    timeout = timedelta(seconds=info.timeout_s)
    return dist.PrefixStore("qarl", dist.TCPStore(info.host, info.port, None, False, timeout=timeout, wait_for_workers=False))
