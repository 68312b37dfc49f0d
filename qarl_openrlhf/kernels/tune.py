"""Choose a kernel's block sizes once for each family of shapes, and remember the choice on disk.

A family is everything that changes the best choice (dtypes, N, K) and M rounded up to a power of two, so that ragged
batches neither tune nor compile again in mid-training. The file is ``autotune-<card>-triton<version>.json`` in
``Tuner.directory``, inside Triton's own cache, so that it is the user's as that is; deleting it is safe. Without the file (one that
cannot be read counts as none, one that cannot be written is left out) every process times anew. Candidates that a card cannot hold
(shared memory) are passed over.
"""

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.kernels.library import INTERPRETED

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Block sizes (what they mean is the kernel's business), warps a program, and pipeline stages."""

    sizes: tuple[int, ...]
    warps: int
    stages: int


def bucket(m: int, low: int = 16, high: int = 16384) -> int:
    """M rounded up to a power of two in [low, high]."""
    return min(max(triton.next_power_of_2(m), low), high)


class Tuner:
    """Remembered choices of one process, read from and written to disk."""

    directory = Path(triton.knobs.cache.dir) / "qarl_openrlhf"
    choices: dict[str, Config] = {}
    path: Path | None = None
    writable = True

    @classmethod
    def load(cls) -> None:
        card = torch.cuda.get_device_name().replace(" ", "-")
        cls.path = cls.directory / f"autotune-{card}-triton{triton.__version__}.json"
        cls.choices = cls._stored()

    @classmethod
    def _stored(cls) -> dict[str, Config]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, another user's, or broken
            stored = json.loads(cls.path.read_text())
            return {key: Config(tuple(c["sizes"]), c["warps"], c["stages"]) for key, c in stored.items()}
        return {}

    @classmethod
    def save(cls) -> None:
        """Replace the file in one step, with what other ranks have found meanwhile: those that tune side by side leave no broken one."""
        if not cls.writable:
            return
        try:
            choices = cls._stored() | cls.choices
            with atomic_file(cls.path) as part, open(part, "w") as file:
                json.dump({key: c.__dict__ for key, c in sorted(choices.items())}, file, indent=1)
        except OSError as error:
            cls.writable = False
            log.warning("block sizes of kernels are not kept for later runs: %s cannot be written (%s)", cls.path, error)


def tuned(kernel: str, family: tuple, candidates: list[Config], launch: Callable[[Config], None]) -> Config:
    """The fastest candidate for this family; ``launch`` runs the kernel and must be repeatable."""
    if INTERPRETED or len(candidates) == 1:
        return candidates[0]
    if Tuner.path is None:
        Tuner.load()
    key = f"{kernel} {' '.join(str(part) for part in family)}"
    if Tuner.choices.get(key) not in candidates:
        if torch.cuda.is_current_stream_capturing():
            return candidates[0]  # nothing can be timed now
        Tuner.choices[key] = min(candidates, key=lambda config: _time(launch, config))
        Tuner.save()
    return Tuner.choices[key]


def _time(launch: Callable[[Config], None], config: Config) -> float:
    try:
        return triton.testing.do_bench(lambda: launch(config), warmup=3, rep=15, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return float("inf")
