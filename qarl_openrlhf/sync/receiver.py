"""The engine's end of a weight update: vLLM's weight-transfer backend "qarl", in every worker process of every engine.

Nothing here raises into vLLM. With more than one rank, vLLM's executor stops reading answers at the first rank that fails
and takes the left-over answers of the others for those of the *next* call. So an error is kept, all later steps of this
update do nothing, and :meth:`QarlWeightTransfer.status` reports it; the actor asks after every step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from qarl_openrlhf.engine import cpu_method, layout
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
    """bucket: :class:`Bucket` as a dict."""

    bucket: dict


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
        self.slots: dict[str, layout.Slot] = {}
        self.received: dict[str, int | None] = {}
        self.receipt: dict = {}

    # ---- vLLM's life cycle --------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        self.group, self.error = None, None
        self.verify = init_info.verify
        rank = self.parallel_config.rank + init_info.rank_offset
        info = transport.GroupInfo(**init_info.group)

        def join():
            self.group = transport.join(info, rank, init_info.address)

        self._guard(join)

    def start_weight_update(self) -> None:
        self.received.clear()
        self.receipt = {"rank": self.parallel_config.rank, "tensors": 0, "bytes": 0, "load_ms": 0.0, "verify_ms": 0.0}
        self._guard(self._start)

    def update_weights(self, update_info: dict) -> None:
        # Not the base class's: it synchronizes an accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TransferUpdate) -> None:
        self._guard(lambda: self._receive(Bucket.from_dict(update_info.bucket)))

    def finish_weight_update(self) -> None:
        self._guard(self._finish)

    def shutdown(self) -> None:
        self.group = None

    # ---- what the actor asks ------------------------------------------------------------------------------------------

    def status(self) -> dict:
        """Receipt of this rank: rank, error (None or the reason), tensors, bytes, load_ms, verify_ms, checksum_ok."""
        return {"rank": self.parallel_config.rank, **self.receipt, "error": self.error}

    def abort(self) -> None:
        """Give up the current update and leave the group."""
        self.group = None
        self.error = self.error or "aborted"

    # ---- steps --------------------------------------------------------------------------------------------------------

    def _guard(self, step: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            step()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            # Leaving closes the connections: peers that wait for this rank fail at once, not at their time-out.
            self.group = None

    def _start(self) -> None:
        if self.group is None:
            raise RuntimeError("a weight update was started before the engine joined a transport group")
        if not cpu_method.is_in_place(self.model):
            raise NotImplementedError("this engine's layers repack their weights; only the method 'qarl' updates in place")
        self.slots = layout.slots(self.model)

    def _receive(self, bucket: Bucket) -> None:
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
        transport.receive(self.group, flat)
        started = time.perf_counter()
        tensors = bucket.unpack(flat)
        for name, tensor in tensors.items():
            self._check(name, tensor)
        verified = time.perf_counter()
        self.model.load_weights(list(tensors.items()))
        self._remember(bucket, tensors)
        self.receipt["verify_ms"] += (verified - started) * 1e3
        self.receipt["load_ms"] += (time.perf_counter() - verified) * 1e3
        self.receipt["tensors"] += len(tensors)
        self.receipt["bytes"] += bucket.nbytes

    def _check(self, name: str, tensor: Tensor) -> None:
        """Refuse a tensor that the model does not expect, or that no weight should look like, before anything is applied."""
        slot = self.slots.get(name)
        if slot is None:
            raise ManifestError(f"tensor {name} is not one of the {len(self.slots)} tensors this engine's model has")
        if name in self.received:
            raise ManifestError(f"tensor {name} arrived twice in one update")
        if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
            raise ManifestError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the engine's model has {slot.dtype} {list(slot.shape)}"
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ManifestError(f"tensor {name} has {bad} NaN or infinite values out of {tensor.numel()}")

    def _remember(self, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        for entry in bucket.entries:
            part = self.slots[entry.name].part
            digest = entry.checksum
            if self.verify == "readback" and (digest is None or part.dim is not None):
                digest = checksum(part.of(tensors[entry.name]))
            self.received[entry.name] = digest

    def _finish(self) -> None:
        missing = [name for name in self.slots if name not in self.received]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ManifestError(f"the update lacks {len(missing)} tensors: {', '.join(missing[:3])}{more}")
        started = time.perf_counter()
        cpu_method.refresh(self.model)
        loaded = time.perf_counter()
        if self.verify == "readback":
            self._read_back()
        self.receipt["load_ms"] += (loaded - started) * 1e3
        self.receipt["verify_ms"] += (time.perf_counter() - loaded) * 1e3
        self.receipt["checksum_ok"] = self.verify != "off"

    def _read_back(self) -> None:
        """Checksums of what now lies in the engine's own parameters."""
        for name, slot in self.slots.items():
            if checksum(slot.read()) != self.received[name]:
                raise ManifestError(f"tensor {name} reads back differently from the engine's parameters than it was sent")
