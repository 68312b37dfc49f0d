"""What travels: flat byte buckets, each with a manifest that says what is in it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from qarl_openrlhf.sync.checksum import as_bytes, digests
from qarl_openrlhf.sync.errors import ManifestError

ALIGNMENT = 16  # every tensor starts at a multiple, so that a slice of the bucket can be viewed as any dtype


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a bucket: checkpoint name, dtype ('bfloat16'), shape, place in the bucket, checksum of its bytes.

    checksum is None where verification is off.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int | None

    @property
    def piece(self) -> tuple[int, int, torch.dtype]:
        """(offset, nbytes, dtype)."""
        return self.offset, self.nbytes, getattr(torch, self.dtype)

    def view(self, flat: Tensor) -> Tensor:
        """This tensor as a view into the bucket's bytes (uint8 [bucket.nbytes])."""
        raw = flat[self.offset : self.offset + self.nbytes]
        return raw.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Manifest of one flat buffer of ``nbytes`` bytes: bucket ``index`` of update ``version``."""

    version: int
    index: int
    nbytes: int
    entries: tuple[TensorEntry, ...]

    def to_dict(self) -> dict:
        """Plain lists, strings and integers, for any RPC encoding."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: dict) -> "Bucket":
        entries = tuple(TensorEntry(**{**e, "shape": tuple(e["shape"])}) for e in d["entries"])
        return cls(d["version"], d["index"], d["nbytes"], entries)

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def verify(self, flat: Tensor) -> None:
        """ManifestError naming the first tensor whose checksum differs from the sender's, or that is not finite."""
        self.verifying(flat)()

    def verifying(self, flat: Tensor) -> Callable[[], None]:
        """Start what :meth:`verify` does on the bucket's device; a call waits for it and raises."""
        summed = any(entry.checksum is not None for entry in self.entries)
        # Without checksums only a value that can be NaN is looked at: of a packed layer its scales.
        entries = [entry for entry in self.entries if summed or entry.piece[2].is_floating_point]
        results = digests(flat, [entry.piece for entry in entries], sums=summed)
        return lambda: self._compare(flat, entries, *results())

    def _compare(self, flat: Tensor, entries: list[TensorEntry], sums: list[int], bad: list[int]) -> None:
        for entry, got, wrong in zip(entries, sums, bad, strict=True):
            if entry.checksum is not None and got != entry.checksum:
                raise ManifestError(
                    f"tensor {entry.name} arrived with checksum {got:016x}, sent with {entry.checksum:016x} "
                    f"(bucket {self.index} of version {self.version})"
                )
            if wrong:
                of = entry.view(flat).numel()
                raise ManifestError(f"tensor {entry.name} has {wrong} NaN or infinite values out of {of}")

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views into ``flat`` by checkpoint name."""
        return {entry.name: entry.view(flat) for entry in self.entries}


def pack_buckets(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    version: int,
    bucket_bytes: int,
    with_checksums: bool,
    allocate: Callable[[int], Tensor] | None = None,
) -> Iterator[tuple[Bucket, Tensor]]:
    """Group (checkpoint name, tensor) pairs into flat buffers of about ``bucket_bytes``, in order.

    Yields (manifest, uint8 [nbytes]) as soon as a bucket is full, so packing one can overlap with sending the one before.
    A tensor larger than a bucket travels alone. allocate: gives the memory of a bucket (default: a new one each, on the
    device of its first tensor). ManifestError if a name comes twice.
    """
    seen: set[str] = set()
    pending: list[tuple[str, Tensor, int]] = []
    size = index = 0
    for name, tensor in named_tensors:
        if name in seen:
            raise ManifestError(f"tensor {name} is published twice in version {version}")
        seen.add(name)
        if pending and size + tensor.nbytes > bucket_bytes:
            yield _pack(pending, size, version, index, with_checksums, allocate)
            pending, size, index = [], 0, index + 1
        pending.append((name, tensor, size))
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if pending:
        yield _pack(pending, size, version, index, with_checksums, allocate)


def _pack(pending: list[tuple[str, Tensor, int]], size: int, version: int, index: int, with_checksums: bool, allocate):
    flat = allocate(size) if allocate else torch.empty(size, dtype=torch.uint8, device=pending[0][1].device)
    for _, tensor, offset in pending:
        end = offset + tensor.nbytes
        flat[offset:end].copy_(as_bytes(tensor))
        flat[end : -(-end // ALIGNMENT) * ALIGNMENT].zero_()
    sums = [None] * len(pending)
    if with_checksums:
        sums, _ = digests(flat, [(offset, tensor.nbytes, torch.uint8) for _, tensor, offset in pending])()
    entries = [
        TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, tensor.nbytes, digest)
        for (name, tensor, offset), digest in zip(pending, sums, strict=True)
    ]
    return Bucket(version, index, size, tuple(entries)), flat
