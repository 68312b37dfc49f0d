"""What one GPU is given to do in a step: prompts, samples a prompt, and how long the responses are."""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

KINDS = ("fixed", "mixed")
# Of "mixed": responses as reasoning models write them, a few many times as long as most, cut at the limit.
MEDIAN, SPREAD = 1 / 3, 0.8


@dataclass(frozen=True)
class Workload:
    """``prompts`` x ``samples`` responses to prompts of ``prompt`` tokens, of at most ``response`` tokens, on one GPU.

    ``update_samples``: responses of one GPU in an optimizer step (the paper: 64 prompts x 8 samples on 8 GPUs, 64 a GPU).
    """

    prompt: int
    response: int
    prompts: int
    samples: int
    update_samples: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def updates(self) -> float:
        return max(1.0, self.sequences / self.update_samples)

    def lengths(self, kind: str, count: int | None = None) -> list[int]:
        """Response lengths in tokens; by default of all sequences. The same every time.

        "fixed": all of the longest. "mixed": quantiles of a log-normal distribution with median a third of the longest,
        cut there, in random order. Quantiles and not draws, so that any count has nearly the same mean.
        """
        count = self.sequences if count is None else count
        if kind == "fixed":
            return [self.response] * count
        normal = NormalDist(math.log(self.response * MEDIAN), SPREAD)
        exact = (math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count))
        lengths = [max(1, min(self.response, round(x))) for x in exact]
        random.Random(0).shuffle(lengths)
        return lengths

    def tokens(self, kind: str) -> int:
        """Prompt and response tokens of all sequences."""
        return sum(self.prompt + n for n in self.lengths(kind))
