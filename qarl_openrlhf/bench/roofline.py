"""The least time a phase can take on a card: bytes over bandwidth or operations over peak, whichever is more.

Bounds, not forecasts: what a phase takes beside its bound is launch gaps, attention below peak, norms, sampling, waiting.
"""

from dataclasses import dataclass

from qarl_openrlhf.planning.model_shape import ModelShape, packed_bytes
from qarl_openrlhf.quant.scheme import QuantScheme


@dataclass(frozen=True)
class Card:
    """Dense tensor core peaks (operations/s) and memory bandwidth (bytes/s) of the vendor's data sheet."""

    bf16: float
    eight_bit: float
    bandwidth: float


CARDS = {
    "H200": Card(989e12, 1979e12, 4.8e12),
    "H100": Card(989e12, 1979e12, 3.35e12),
    "A100": Card(312e12, 624e12, 2.0e12),
}


def card_of(name: str) -> Card | None:
    """By the name that CUDA gives; None for a card that is not in the table (a CPU, too)."""
    return next((card for key, card in CARDS.items() if key in name), None)


def newton_schulz_operations(shapes: dict[str, tuple[int, int, int]], steps: int = 5) -> float:
    """Of one Muon step over matrices (count, rows, columns): a step is X X^T, its square, and a product with X."""
    total = 0.0
    for count, rows, columns in shapes.values():
        m, n = sorted((rows, columns))
        total += count * steps * (4 * m * m * n + 2 * m**3)
    return total


@dataclass(frozen=True)
class Bounds:
    """Of one model in one scheme on one card; ``experts``, ``experts_a_token``: 0 of a dense model."""

    card: Card
    shape: ModelShape
    scheme: QuantScheme
    newton_schulz: float
    experts: int = 0
    experts_a_token: int = 0

    @property
    def attention(self) -> int:
        """Weights of all q, k, v and o projections."""
        s = self.shape
        return s.layers * s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)

    @property
    def active(self) -> int:
        """Quantizable weights that a token passes through."""
        return self.attention + 3 * self.shape.layers * self.shape.hidden * self.shape.mlp

    @property
    def _other(self) -> int:
        """lm_head: read in every decode step, multiplied with every token."""
        return self.shape.hidden * self.shape.vocabulary

    def _peak(self, quantized: bool) -> float:
        return self.card.eight_bit if quantized and self.scheme.activation_format != "bf16" else self.card.bf16

    def decode_step(self, sequences: float, context: float) -> float:
        """Seconds for one token of each of ``sequences``, which have ``context`` tokens each."""
        s = self.shape
        touched = s.quantized
        if self.experts:
            missed = (1 - self.experts_a_token / self.experts) ** sequences
            touched = self.attention + (s.quantized - self.attention) * (1 - missed)
        cache = 4 * s.layers * s.kv_heads * s.head_dim * context * sequences
        moved = touched * packed_bytes(self.scheme) + 2 * self._other + cache
        operations = 2 * sequences * self.active
        return max(moved / self.card.bandwidth, operations / self._peak(True) + 2 * sequences * self._other / self.card.bf16)

    def rollout(self, prompts: int, samples: int, prompt: int, lengths: list[int]) -> float:
        """Seconds for a rollout: every prompt read once a sample (no prefix cache), then one step a token, all at once."""
        prefill = 2 * prompts * samples * prompt * self.active / self._peak(True)
        total, running, position = prefill, sorted(lengths), 0
        for index, end in enumerate(running):
            if end > position:
                total += (end - position) * self.decode_step(len(running) - index, prompt + (position + end) / 2)
                position = end
        return total

    def _attention(self, lengths: list[int]) -> float:
        """Operations of causal attention, forward, all layers."""
        return sum(2.0 * self.shape.layers * self.shape.heads * self.shape.head_dim * n * n for n in lengths)

    def forward(self, lengths: list[int]) -> float:
        """Seconds for the forward of sequences of so many tokens each, in the learner's scheme."""
        tokens = sum(lengths)
        quantized = 2 * tokens * self.active / self._peak(self.scheme.aligned)
        return quantized + (2 * tokens * self._other + self._attention(lengths)) / self.card.bf16

    def forward_backward(self, lengths: list[int], checkpointing: bool = True) -> float:
        """Seconds; the backward is BF16 and twice a BF16 forward, and a checkpointed layer is run forward twice."""
        tokens = sum(lengths)
        backward = (4 * tokens * (self.active + self._other) + 2.5 * self._attention(lengths)) / self.card.bf16
        again = self.forward(lengths) - 2 * tokens * self._other / self.card.bf16 if checkpointing else 0.0
        return self.forward(lengths) + again + backward

    def optimizer(self, optimizer: str) -> float:
        """Seconds for one step, all states on this card.

        Bytes: float32 weight and moments read and written, BF16 gradient read, BF16 weight written; operations: Newton-Schulz.
        """
        s = self.shape
        matrices = s.matrices if optimizer == "muon" else 0
        moved = 20 * matrices + 28 * (s.parameters - matrices)
        operations = self.newton_schulz if matrices else 0.0
        return max(moved / self.card.bandwidth, operations / self.card.bf16)

    def quantize(self, copy: bool) -> float:
        """Seconds to quantize every weight once: BF16 read, packed written, and BF16 written again if a copy is kept."""
        if not self.scheme.quantized:
            return 0.0
        return self.shape.quantized * (2 + packed_bytes(self.scheme) + 2 * copy) / self.card.bandwidth

    def push(self) -> float:
        """Seconds for quantizing and three passes over the published bytes: packed into a bucket, checked, loaded."""
        published = self.shape.quantized * packed_bytes(self.scheme) + 2 * (self.shape.parameters - self.shape.quantized)
        return self.quantize(copy=False) + 5 * published / self.card.bandwidth  # two of the passes also write
