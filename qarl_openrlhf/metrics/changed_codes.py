"""Which share of the low-bit codes a publish changed: whether small updates reach the sampler at all."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)
SAMPLE = 1 << 18  # bytes of a GPU tensor that are kept


class ChangedCodes:
    """Compares the codes in one stream of published tensors with those in the stream before.

    Keeps the last codes by reference (half a byte a weight at 4 bits): every quantization makes new tensors. On a CPU,
    where memory is plenty, also the first ones, for the share that differs from the start policy's. On a GPU, where it is
    not, evenly spaced rows of each tensor stand for all of it (about ``SAMPLE`` bytes), and nothing waits for the device
    before :meth:`metrics`.
    """

    def __init__(self):
        self.first: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.changed = self.changed_since_first = self.total = 0

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass (checkpoint name, tensor) through, counting."""
        self.changed = self.changed_since_first = self.total = 0
        for name, tensor in tensors:
            packed = name.endswith(".weight_packed")
            if packed or tensor.dtype in CODE_DTYPES:
                codes = _sample(tensor) if tensor.is_cuda else tensor
                self.total += codes.numel() * (8 if packed else 1)
                self.changed += _differing(self.last.get(name, codes), codes, packed)
                self.last[name] = codes
                if tensor.device.type == "cpu":
                    self.changed_since_first += _differing(self.first.setdefault(name, codes), codes, packed)
            yield name, tensor

    def metrics(self) -> dict[str, float]:
        """``sync/changed_code_frac`` (since the last publish) and, on a CPU, ``..._total`` (since the first)."""
        metrics = {"sync/changed_code_frac": float(self.changed) / self.total if self.total else 0.0}
        if self.first:
            metrics["sync/changed_code_frac_total"] = float(self.changed_since_first) / self.total
        return metrics


def _sample(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows[:: max(1, rows.nbytes // SAMPLE)].clone()


def _differing(before: Tensor, now: Tensor, packed: bool) -> int | Tensor:
    """Number of codes that differ; on a GPU a tensor, so that nothing waits."""
    if before is now:
        return 0
    differ = now.view(torch.uint8) ^ before.view(torch.uint8)
    halves = (differ & 0x0F, differ & 0xF0) if packed else (differ,)
    return sum(torch.count_nonzero(half) for half in halves)


def still_line(args, step: int, changed: float | None, mixed: float | None = None) -> str | None:
    """Said once, after three steps: not one low-bit code has changed, so every rollout has had the start policy's weights."""
    if step != 3 or changed is None or changed > 0 or args.quant.scheme == "bf16" or mixed == 0:  # without a signal no rate changes them
        return None
    flag = "actor.muon.lr" if args.actor.optim == "muon" else "actor.adam.lr"
    rate = args.actor.muon.lr if args.actor.optim == "muon" else args.actor.adam.lr
    return (
        f"no weight has changed its {args.quant.scheme} code in {step} steps, so the policy that is sampled from has not changed: raise "
        f"--{flag} (now {rate:g})"
    )
