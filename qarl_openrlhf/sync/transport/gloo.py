"""The gloo group that carries buckets: learner rank 0 sends, every rank of every engine receives.

It is a group of its own, made from a store that the learner opens on a free port: the processes' default group belongs to
DeepSpeed or vLLM, and vLLM's ``PyNcclCommunicator`` becomes a silent no-op on a machine without libnccl. A group that has
failed is thrown away; the next publish makes a new one on a new port.

Other transports (NCCL, CUDA IPC) come beside this one, with the same ``Sender`` / ``join`` pair.
"""

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo


@dataclass(frozen=True)
class GroupInfo:
    """Where a group's store listens, how many ranks join (rank 0 is the learner), and the longest wait in it (seconds)."""

    host: str
    port: int
    world_size: int
    timeout_s: float

    def to_dict(self) -> dict:
        return asdict(self)


def _group(store: dist.Store, rank: int, info: GroupInfo, address: str | None) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    if address and not os.environ.get("GLOO_SOCKET_IFNAME"):
        # The address peers can reach, not whatever this host's name happens to resolve to.
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    options._timeout = timedelta(seconds=info.timeout_s)
    options._threads = 1
    return ProcessGroupGloo(store, rank, info.world_size, options)


def _from_rank_zero() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


def join(info: GroupInfo, rank: int, address: str | None = None) -> ProcessGroupGloo:
    """Join as ``rank``; blocks until all are there. RuntimeError after ``info.timeout_s`` or when the sender closes.

    address: of this host's interface that the others can reach.
    """
    timeout = timedelta(seconds=info.timeout_s)
    store = dist.TCPStore(info.host, info.port, None, False, timeout=timeout, wait_for_workers=False)
    return _group(dist.PrefixStore("qarl", store), rank, info, address)


def receive(group: ProcessGroupGloo, flat: Tensor) -> None:
    """Fill ``flat`` (uint8, contiguous) with the next bucket; RuntimeError if a peer is gone or the group times out."""
    group.broadcast([flat], _from_rank_zero()).wait()


class Sender:
    """The learner's end. Nothing here blocks: the publisher polls, since it must watch the engines at the same time."""

    def __init__(self, host: str, world_size: int, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        # Port 0: the store binds a free port itself, so nobody can take it in between.
        self.store: dist.TCPStore | None = dist.TCPStore(host, 0, None, True, timeout=timeout, wait_for_workers=False)
        self.info = GroupInfo(host, self.store.port, world_size, timeout_s)
        self.group: ProcessGroupGloo | None = None
        self.work: dist.Work | None = None

    def connect(self) -> Future:
        """Start to form the group; the future is done when all receivers have joined, or failed after the time-out."""
        joined: Future = Future()

        def form():
            try:
                self.group = join(self.info, 0, self.info.host)
                joined.set_result(None)
            except Exception as error:
                joined.set_exception(error)

        threading.Thread(target=form, name="qarl-gloo-connect", daemon=True).start()
        return joined

    def broadcast(self, flat: Tensor) -> dist.Work:
        """Start to send a bucket (uint8, contiguous; it must stay alive until the work is completed)."""
        self.work = self.group.broadcast([flat], _from_rank_zero())
        return self.work

    def close(self) -> None:
        """Drop the store and the group; ranks that still wait for the group to form fail at once. Does not block.

        gloo cannot cancel a send, and its destructor waits for it: a daemon thread keeps the group until the send has
        failed or timed out.
        """
        self.store = None
        group, self.group, work, self.work = self.group, None, self.work, None
        if group is None or work is None or work.is_completed():
            return

        def bury(group, work):
            while not work.is_completed():
                time.sleep(0.1)

        threading.Thread(target=bury, args=(group, work), name="qarl-gloo-close", daemon=True).start()
