"""Merged linear shapes of the models that the paper and we train."""

from typing import NamedTuple


class Linear(NamedTuple):
    """One linear layer: ``count`` of it in the model, K input and N output features."""

    model: str
    layer: str
    k: int
    n: int
    count: int


def _model(name: str, hidden: int, q: int, kv: int, intermediate: int | None, layers: int) -> list[Linear]:
    linears = [Linear(name, "qkv", hidden, q + 2 * kv, layers), Linear(name, "o", q, hidden, layers)]
    if intermediate is not None:
        linears += [
            Linear(name, "gate_up", hidden, 2 * intermediate, layers),
            Linear(name, "down", intermediate, hidden, layers),
        ]
    return linears


MODELS = {
    "Qwen2.5-Math-1.5B": _model("Qwen2.5-Math-1.5B", 1536, 1536, 256, 8960, 28),
    "Qwen2.5-Math-7B": _model("Qwen2.5-Math-7B", 3584, 3584, 512, 18944, 28),
    "Qwen3-8B": _model("Qwen3-8B", 4096, 4096, 1024, 12288, 36),
    "Qwen3-30B-A3B": _model("Qwen3-30B-A3B", 2048, 4096, 512, None, 48),  # its experts: family `grouped`
}
ROWS = (1, 16, 64, 256, 1024, 4096, 16384)


class Experts(NamedTuple):
    """MoE layer of Qwen3-30B-A3B."""

    experts: int = 128
    active: int = 8
    hidden: int = 2048
    intermediate: int = 768
    layers: int = 48
