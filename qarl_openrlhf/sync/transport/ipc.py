"""CUDA IPC: learner and engines on the same GPUs; an engine reads the learner's buffer where it lies.

Only handles travel, over the RPC that announces the bucket. The learner's two buffers stay for the life of the group, so an
engine maps each of them once, and never more than two buckets are copied. An engine on another GPU of the host than learner
rank 0 maps the buffer through peer access and copies it over NVLink or PCIe.
"""

from concurrent.futures import Future

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from qarl_openrlhf.sync.transport import Done, GroupInfo, Sending, StagedSender

HINT = "learner and engines apart (without --train.colocate_all) push over nccl"


class Receiver:
    """One engine rank's end."""

    overlapped = False  # the learner fills the other buffer meanwhile, so a bucket must be applied before the call returns

    def __init__(self, info: GroupInfo, rank: int, device: torch.device, address: str | None = None):
        self.rank, self.device = rank, device
        self.gpu = str(torch.cuda.get_device_properties(device).uuid)
        self.mapped: dict[tuple, Tensor] = {}

    def begin(self) -> None:
        pass

    def receive(self, nbytes: int, ticket: dict) -> Tensor:
        """The bucket, uint8 [nbytes]: a view of the learner's memory, or a copy of it where that is another GPU's."""
        key = ticket["key"]
        if key not in self.mapped:
            self.mapped = {k: v for k, v in self.mapped.items() if k[0] != key[0]}  # a buffer that was grown
            arguments = list(ticket["handles"][self.rank - 1])
            arguments[6] = self.device.index  # mapped into this device's address space, wherever the memory is
            try:
                self.mapped[key] = rebuild_cuda_tensor(*arguments)
            except RuntimeError as error:
                raise RuntimeError(
                    f"transport ipc: rank {self.rank} on GPU {self.gpu} cannot map memory of GPU {ticket['gpu']} ({error}); {HINT}"
                ) from error
        flat = self.mapped[key][:nbytes]
        return flat if ticket["gpu"] == self.gpu else flat.clone()

    def close(self) -> None:
        self.mapped.clear()


class Sender(StagedSender):
    """The learner's end. There is no group to form: an engine is reached through its RPCs."""

    def __init__(self, host: str, world_size: int, timeout_s: float, device: torch.device):
        super().__init__(GroupInfo("ipc", host, 0, world_size, timeout_s), device)
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.handles: dict[int, tuple[tuple, list]] = {}  # by buffer: its key, and a handle for each receiver

    def connect(self) -> Future:
        joined: Future = Future()
        joined.set_result(None)
        return joined

    def send(self, flat: Tensor) -> Sending:
        """Waits until the GPU has filled ``flat``; engines read it once they have the ticket."""
        torch.cuda.current_stream(self.device).synchronize()
        turn = self.staging.turn
        whole = self.staging.buffers[turn]
        key = (turn, whole.data_ptr(), whole.numel())
        if self.handles.get(turn, (None,))[0] != key:
            # Torch counts one receiver a handle.
            self.handles[turn] = key, [self._share(whole) for _ in range(self.info.world_size - 1)]
        return Sending(Done(), {"gpu": self.uuid, "key": key, "handles": self.handles[turn][1]})

    def _share(self, whole: Tensor) -> tuple:
        try:
            return reduce_tensor(whole)[1]
        except RuntimeError as error:
            raise RuntimeError(
                f"transport ipc: this GPU memory cannot be shared ({error}); PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
                f"is a known cause; {HINT}"
            ) from error

    def close(self) -> None:
        self.handles.clear()
