"""gloo: learner rank 0 broadcasts from host memory to every rank of every engine.

A group of its own, not vLLM's ``PyNcclCommunicator``, which becomes a silent no-op on a machine without libnccl.
"""

import os
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from qarl_openrlhf.sync.transport import GroupInfo, Sending, join_store, open_store


def _group(info: GroupInfo, rank: int, address: str | None) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    if address and not os.environ.get("GLOO_SOCKET_IFNAME"):
        # The address peers can reach, not whatever this host's name happens to resolve to.
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    options._timeout = timedelta(seconds=info.timeout_s)
    options._threads = 1
    return ProcessGroupGloo(join_store(info), rank, info.world_size, options)


def _from_rank_zero() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


class Receiver:
    """One engine rank's end."""

    overlapped = False  # a bucket is applied in the call that received it: both use the same cores

    def __init__(self, info: GroupInfo, rank: int, device: torch.device, address: str | None = None):
        self.group = _group(info, rank, address)

    def begin(self) -> None:
        pass

    def receive(self, nbytes: int, ticket=None) -> Tensor:
        """The next bucket, uint8 [nbytes]; RuntimeError if a peer is gone or the group times out."""
        flat = torch.empty(nbytes, dtype=torch.uint8)
        self.group.broadcast([flat], _from_rank_zero()).wait()
        return flat

    def close(self) -> None:
        """Leaving closes the connections: peers that wait for this rank fail at once, not at their time-out."""
        self.group = None


class Sender:
    """The learner's end. Nothing here blocks: the publisher polls, since it must watch the engines at the same time."""

    def __init__(self, host: str, world_size: int, timeout_s: float, device: torch.device | None = None):
        self.store: dist.TCPStore | None = open_store(host, timeout_s)
        self.info = GroupInfo("gloo", host, self.store.port, world_size, timeout_s)
        self.group: ProcessGroupGloo | None = None
        self.work: dist.Work | None = None

    def connect(self) -> Future:
        """Start to form the group; the future is done when all receivers have joined, or failed after the time-out."""
        joined: Future = Future()

        def form():
            try:
                self.group = _group(self.info, 0, self.info.host)
                joined.set_result(None)
            except Exception as error:
                joined.set_exception(error)

        threading.Thread(target=form, name="qarl-gloo-connect", daemon=True).start()
        return joined

    def begin(self) -> None:
        pass

    def buffer(self, nbytes: int) -> Tensor:
        """Zeroed memory for one bucket; it must stay alive until its send is completed."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def send(self, flat: Tensor) -> Sending:
        """Start to send a bucket (uint8, contiguous)."""
        self.work = self.group.broadcast([flat], _from_rank_zero())
        return Sending(self.work)

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
