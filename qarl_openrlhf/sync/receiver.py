"""The engine's end of a weight update: vLLM's weight-transfer backend "qarl", in every worker process of every engine.

Nothing here raises into vLLM. With more than one rank, vLLM's executor stops reading answers at the first rank that fails
and takes the left-over answers of the others for those of the *next* call. So an error is kept, all later steps of this
update do nothing, and :meth:`QarlWeightTransfer.status` reports it; the actor asks after every step.
"""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from qarl_openrlhf.engine.target import CpuTarget, GpuTarget, target_for
from qarl_openrlhf.sync import transport
from qarl_openrlhf.sync.checksum import checksum
from qarl_openrlhf.sync.errors import ManifestError
from qarl_openrlhf.sync.manifest import Bucket


@dataclass
class TransferInit(WeightTransferInitInfo):
    """group: :class:`transport.GroupInfo` as a dict; rank_offset: rank of this engine's first worker; address: of this host."""

    group: dict
    rank_offset: int
    verify: str
    address: str | None = None


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """bucket: :class:`Bucket` as a dict; ticket: pickled, what the transport's sender has to tell the receivers."""

    bucket: dict
    ticket: bytes


class QarlWeightTransfer(WeightTransferEngine[TransferInit, TransferUpdate]):
    """Receives buckets, proves them, loads them through vLLM's own loaders, and proves the model complete."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    supports_draft_weight_update = False

    def __init__(self, *args):
        super().__init__(*args)
        self.group = None
        self.verify = "checksum"
        self.error: str | None = None
        self.target: CpuTarget | GpuTarget | None = None
        self.arriving: tuple[Bucket, Tensor] | None = None  # received, not applied yet
        self.received: dict[str, int | None] = {}
        self.receipt: dict = {}

    # ---- vLLM's life cycle --------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        self._leave()
        self.error = None
        self.verify = init_info.verify
        rank = self.parallel_config.rank + init_info.rank_offset
        info = transport.GroupInfo(**init_info.group)

        def join():
            self.group = transport.join(info, rank, self.device, init_info.address)

        self._guard(join)

    def start_weight_update(self) -> None:
        self.received.clear()
        self.receipt = {"rank": self.parallel_config.rank, "tensors": 0, "bytes": 0, "load_ms": 0.0, "verify_ms": 0.0}
        self._guard(self._start)

    def update_weights(self, update_info: dict) -> None:
        # Not the base class's: it synchronizes an accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TransferUpdate) -> None:
        self._guard(lambda: self._receive(Bucket.from_dict(update_info.bucket), pickle.loads(update_info.ticket)))

    def finish_weight_update(self) -> None:
        self._guard(self._finish)

    def shutdown(self) -> None:
        self._leave()

    @staticmethod
    def trainer_send_weights(*_args, **_kwargs) -> None:
        """Abstract in vLLM 0.26, gone in 0.29: vLLM's own trainer side."""
        raise NotImplementedError("weights are sent by qarl_openrlhf.sync.publisher")

    # ---- what the actor asks ------------------------------------------------------------------------------------------

    def status(self) -> dict:
        """Receipt of this rank: rank, error (None or the reason), tensors, bytes, load_ms, verify_ms, checksum_ok."""
        return {"rank": self.parallel_config.rank, **self.receipt, "error": self.error}

    def abort(self) -> None:
        """Give up the current update and leave the group."""
        self._leave()
        self.error = self.error or "aborted"

    # ---- steps --------------------------------------------------------------------------------------------------------

    def _guard(self, step: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            step()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self._leave()

    def _leave(self) -> None:
        """Leaving closes the connections: peers that wait for this rank fail at once, not at their time-out."""
        group, self.group, self.arriving = self.group, None, None
        if group is not None:
            group.close()

    def _start(self) -> None:
        if self.group is None:
            raise RuntimeError("a weight update was started before the engine joined a transport group")
        if self.target is None:
            self.target = target_for(self.model, self.vllm_config)
        if self.verify == "readback" and not self.target.can_read_back:
            raise RuntimeError(
                "verify readback compares the bytes in the engine's parameters with those sent, but this engine's kernels keep "
                "them in another layout; use --sync.verify checksum (the log-prob probe checks the layout)"
            )
        self.group.begin()
        self.target.begin()

    def _receive(self, bucket: Bucket, ticket) -> None:
        if not self.group.overlapped:
            self._apply(bucket, self.group.receive(bucket.nbytes, ticket))
            return
        # The bucket before is applied while this one is on its way.
        flat, event = self.group.start(bucket.nbytes)
        self._apply_arrived()
        self.group.finish(event)
        self.arriving = bucket, flat

    def _apply_arrived(self) -> None:
        arrived, self.arriving = self.arriving, None
        if arrived is not None:
            self._apply(*arrived)

    def _apply(self, bucket: Bucket, flat: Tensor) -> None:
        started = time.perf_counter()
        prove = bucket.verifying(flat)
        begun = time.perf_counter()
        tensors = bucket.views(flat)
        for name, tensor in tensors.items():
            self._check(name, tensor)
        checked = time.perf_counter()
        prove()  # nothing is applied before
        verified = time.perf_counter()
        self.target.load(tensors)
        self._remember(bucket, tensors)
        self._synchronize()
        self.receipt["verify_ms"] += (begun - started + verified - checked) * 1e3
        self.receipt["load_ms"] += (time.perf_counter() - verified + checked - begun) * 1e3
        self.receipt["tensors"] += len(tensors)
        self.receipt["bytes"] += bucket.nbytes

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _check(self, name: str, tensor: Tensor) -> None:
        """Refuse a tensor that the model does not expect, or that no weight should look like, before anything is applied."""
        slot = self.target.slots.get(name)
        if slot is None:
            raise ManifestError(f"tensor {name} is not one of the {len(self.target.slots)} tensors this engine's model has")
        if name in self.received:
            raise ManifestError(f"tensor {name} arrived twice in one update")
        if tensor.shape != slot.shape or not self.target.takes(slot, tensor.dtype):
            raise ManifestError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the engine's model has {slot.dtype} {list(slot.shape)}"
            )

    def _remember(self, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        for entry in bucket.entries:
            part = self.target.slots[entry.name].part
            digest = entry.checksum
            if self.verify == "readback" and (digest is None or part.dim is not None):
                digest = checksum(part.of(tensors[entry.name]))
            self.received[entry.name] = digest

    def _finish(self) -> None:
        self._apply_arrived()
        missing = [name for name in self.target.slots if name not in self.received]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ManifestError(f"the update lacks {len(missing)} tensors: {', '.join(missing[:3])}{more}")
        started = time.perf_counter()
        self.target.finish()
        self._synchronize()
        loaded = time.perf_counter()
        if self.verify == "readback":
            self._read_back()
        self.receipt["load_ms"] += (loaded - started) * 1e3
        self.receipt["verify_ms"] += (time.perf_counter() - loaded) * 1e3
        self.receipt["checksum_ok"] = self.verify != "off"

    def _read_back(self) -> None:
        """Checksums of what now lies in the engine's own parameters."""
        for name, slot in self.target.slots.items():
            if checksum(slot.read()) != self.received[name]:
                raise ManifestError(f"tensor {name} reads back differently from the engine's parameters than it was sent")
