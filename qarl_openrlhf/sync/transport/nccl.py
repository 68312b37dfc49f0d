"""NCCL: learner rank 0 broadcasts from its GPU to the GPU of every engine rank.

The communicator is our own, through vLLM's bindings of libnccl (``NCCLLibrary`` raises where the library is missing). Not
``ProcessGroupNCCL``, whose watchdog ends the whole process when a peer is lost, and not ``PyNcclCommunicator``, which turns
itself into a no-op without libnccl: here every wait polls, has an end, and aborts the communicator when it passes.
"""

import contextlib
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, buffer_type, cudaStream_t, ncclDataTypeEnum

from qarl_openrlhf.sync.transport import GroupInfo, Sending, StagedSender, Staging, join_store, open_store

POLL_S = 0.0002
LIVENESS_S = 0.25  # how often a waiting receiver looks whether the sender is still there
MAGIC = 0x51A2


class Communicator:
    """An NCCL communicator of rank 0 (learner) and the engine ranks, on a stream of its own.

    RuntimeError if a rank does not come within ``timeout_s``, if two ranks share a GPU, or if the first broadcast does not
    arrive as it was sent.
    """

    def __init__(self, info: GroupInfo, rank: int, store: dist.Store, device: torch.device):
        self.device, self.store, self.timeout_s = device, store, info.timeout_s
        self.comm = None
        with torch.cuda.device(device):
            self.library = NCCLLibrary()
            self.stream = torch.cuda.Stream(device)
            _refuse_shared_gpus(store, rank, info, device)
            if rank == 0:
                store.set("id", bytes(self.library.ncclGetUniqueId().internal).hex())
            unique_id = self.library.unique_id_from_bytes(bytes.fromhex(store.get("id").decode()))
            # All ranks are known to be there: the one call that cannot be interrupted does not wait long.
            self.comm = self.library.ncclCommInitRank(info.world_size, unique_id, rank)
            probe = torch.full((64,), MAGIC if rank == 0 else 0, dtype=torch.int32, device=device)
            self.wait(self.broadcast(probe.view(torch.uint8)), info.timeout_s)
            if not bool((probe == MAGIC).all()):
                raise RuntimeError(f"the NCCL broadcast to rank {rank} delivered something else than was sent")

    def broadcast(self, flat: Tensor) -> torch.cuda.Event:
        """Start to broadcast uint8 ``flat`` from rank 0, after what the current stream has queued; returns its event."""
        if self.comm is None:
            raise RuntimeError("the NCCL communicator was aborted")
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            self.library.ncclBroadcast(
                buffer_type(flat.data_ptr()),
                buffer_type(flat.data_ptr()),
                flat.numel(),
                ncclDataTypeEnum.ncclUint8,
                0,
                self.comm,
                cudaStream_t(self.stream.cuda_stream),
            )
            event = torch.cuda.Event()
            event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event, timeout_s: float) -> None:
        """RuntimeError, after aborting the communicator, if the broadcast does not end in time or the sender has gone."""
        deadline = time.monotonic() + timeout_s
        look = time.monotonic() + LIVENESS_S
        while not event.query():
            now = time.monotonic()
            if now > deadline:
                self.abort()
                raise RuntimeError(f"NCCL time-out: a broadcast did not end within {timeout_s:g} s")
            if now > look:
                look = now + LIVENESS_S
                if self._given_up():
                    self.abort()
                    raise RuntimeError("the sender gave this weight update up or is gone")
            time.sleep(POLL_S)

    def _given_up(self) -> bool:
        try:
            return self.store.check(["given up"])
        except RuntimeError:  # the store lives in the learner's process
            return True

    def abort(self) -> None:
        """Ends whatever kernel still waits for a peer."""
        comm, self.comm = self.comm, None
        if comm is not None:
            self.library.ncclCommAbort(comm)


def _refuse_shared_gpus(store: dist.Store, rank: int, info: GroupInfo, device: torch.device) -> None:
    """Wait until all ranks are known, by the GPU they use. NCCL cannot join two ranks on one GPU."""
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    names = [f"gpu/{i}" for i in range(info.world_size)]
    store.wait(names, timedelta(seconds=info.timeout_s))
    owners: dict[str, int] = {}
    for i, name in enumerate(names):
        other = owners.setdefault(store.get(name).decode(), i)
        if other != i:
            raise RuntimeError(
                f"transport nccl: ranks {other} and {i} use the same GPU (rank 0 is the learner); use --sync.transport ipc for "
                "colocated engines, or give them GPUs of their own"
            )


class Receiver:
    """One engine rank's end. Two buffers take turns, so that a bucket can arrive while the one before is applied."""

    overlapped = True

    def __init__(self, info: GroupInfo, rank: int, device: torch.device, address: str | None = None):
        self.communicator = Communicator(info, rank, join_store(info), device)
        self.staging = Staging(device)
        self.timeout_s = info.timeout_s

    def begin(self) -> None:
        self.staging.begin()

    def start(self, nbytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """Start to receive the next bucket; its bytes are there once :meth:`finish` has returned."""
        flat = self.staging.next(nbytes)
        return flat, self.communicator.broadcast(flat)

    def finish(self, event: torch.cuda.Event) -> None:
        self.communicator.wait(event, self.timeout_s)

    def receive(self, nbytes: int, ticket=None) -> Tensor:
        """The next bucket, uint8 [nbytes]; valid until the next but one is asked for."""
        flat, event = self.start(nbytes)
        self.finish(event)
        return flat

    def close(self) -> None:
        self.communicator.abort()


class _Broadcast:
    """:class:`Work` of one broadcast."""

    def __init__(self, event: torch.cuda.Event):
        self.event = event

    def is_completed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class Sender(StagedSender):
    """The learner's end. Nothing here blocks: the publisher polls, since it must watch the engines at the same time."""

    def __init__(self, host: str, world_size: int, timeout_s: float, device: torch.device):
        self.store: dist.TCPStore | None = open_store(host, timeout_s)
        super().__init__(GroupInfo("nccl", host, self.store.port, world_size, timeout_s), device)
        self.communicator: Communicator | None = None

    def connect(self) -> Future:
        """Start to form the communicator; the future is done when all ranks are in it, or failed after the time-out."""
        joined: Future = Future()

        def form():
            try:
                self.communicator = Communicator(self.info, 0, join_store(self.info), self.device)
                joined.set_result(None)
            except Exception as error:
                joined.set_exception(error)

        threading.Thread(target=form, name="qarl-nccl-connect", daemon=True).start()
        return joined

    def send(self, flat: Tensor) -> Sending:
        """Start to send a bucket that lies in :meth:`buffer`'s memory."""
        return Sending(_Broadcast(self.communicator.broadcast(flat)))

    def close(self) -> None:
        """Abort the communicator and drop the store; receivers that still wait end with an error."""
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            with contextlib.suppress(RuntimeError):
                communicator.store.set("given up", "1")
            communicator.abort()
        self.store = None
