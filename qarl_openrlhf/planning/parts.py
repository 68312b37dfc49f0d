"""Parts of a GPU's memory by phase of a training step, their sum, and what to lower where it is too much."""

from dataclasses import dataclass, field

GIB = 2**30
CONTEXT = int(1.25 * GIB)  # CUDA context, NCCL buffers and kernels of one process
USABLE = 0.97  # of a card's memory: the driver's share, and what the allocator cannot give out in one piece


@dataclass
class Part:
    """One part of the memory of one GPU. advice: flags that lower it, with these arguments; empty if none does."""

    name: str
    bytes: int
    phases: tuple[str, ...]
    advice: str = ""


@dataclass
class Estimate:
    """Parts of one GPU that plays ``role``; ``host``: bytes of main memory a node, for what is offloaded."""

    role: str
    parts: list[Part]
    host: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(phase for part in self.parts for phase in part.phases))

    def total(self, phase: str) -> int:
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> str:
        return max(self.phases, key=self.total)

    def problem(self, card: int) -> str | None:
        """Why this does not fit a card of so many bytes, naming the largest part that a flag lowers; None if it fits."""
        phase, usable = self.peak, int(card * USABLE)
        if self.total(phase) <= usable:
            return None
        parts = sorted((p for p in self.parts if phase in p.phases), key=lambda p: -p.bytes)
        lower = next((p for p in parts if p.advice), parts[0])
        others = [p for p in parts if p.advice and p is not lower][:1]
        hint = f"lower {lower.name} ({gib(lower.bytes)}): {lower.advice or 'a larger card, or more of them'}"
        hint += "".join(f"; or {p.name} ({gib(p.bytes)}): {p.advice}" for p in others)
        return f"{self.role} needs about {gib(self.total(phase))} in phase '{phase}', {gib(usable)} of the card are usable; {hint}"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
