"""KL(start policy || policy) from the sampler's own log-probs.

The sampled tokens of a later step say nothing about the start policy: its log-probs of them would take a forward of a second
model (which OpenRLHF's reference model is: ``--algo.kl.init_coef``). But the *start policy's* own responses were drawn from it,
with its log-probs at hand. A few of them are kept, and after each publish an engine, which is asked for the log-probs of a
fixed text anyway, is asked for theirs:

    KL(start || now) = E_{x ~ start} [ k3(log now(x) - log start(x)) ],   k3(d) = e^d - 1 - d

an unbiased estimate a token, of a few hundred tokens, the same in every step. Its floor is the gap between an engine's decoding
and prefill, about half the square of a BF16 engine's noise in nats.
"""

import json
import os

import torch

from qarl_openrlhf.metrics.errors import named
from qarl_openrlhf.objectives.base import LOG_RATIO_LIMIT

FILE = "start_policy.json"
MAX_RESPONSES, MAX_TOKENS = 16, 8192
SHARE = 16  # at most one response in so many of a step's: a prefill of them is under 1 % of the step's forwards


class StartPolicy:
    """Kept responses: ``ids`` [tokens of prompt and response], and where the response is and the start policy's log-probs of
    it, ``mask`` and ``log_probs`` [len(ids) - 1] (position t is about token t + 1)."""

    def __init__(self, responses: list[dict]):
        self.responses = responses

    @classmethod
    def of(cls, experiences: list, *, count: int, max_length: int) -> "StartPolicy":
        """The first ``count`` of single ``Experience``s, given in random order, that have tokens and fit an engine's prompt; fewer where
        the next would make it more than MAX_TOKENS (the next that fits would be a short one: a choice by length)."""
        responses, room = [], MAX_TOKENS
        for experience in experiences:
            here = experience.attention_mask.flatten().bool()
            ids = experience.sequences.flatten()[here].tolist()
            steps = here[1:] & here[:-1]
            mask = experience.action_mask.flatten().bool()[steps].tolist()
            log_probs = experience.rollout_log_probs.flatten()[steps].float()
            finite = bool(log_probs.isfinite()[torch.tensor(mask, dtype=torch.bool)].all())
            if not any(mask) or not finite or len(ids) > min(max_length, MAX_TOKENS):
                continue
            if len(ids) > room:
                break
            responses.append({"ids": ids, "mask": [int(m) for m in mask], "log_probs": [round(x, 6) for x in log_probs.tolist()]})
            room -= len(ids)
            if len(responses) == count:
                break
        return cls(responses)

    @classmethod
    def load(cls, directory: str) -> "StartPolicy | None":
        """What a run in ``directory`` kept; None if there is none."""
        path = os.path.join(directory, FILE)
        if not os.path.exists(path):
            return None
        with open(path, encoding="utf-8") as file:
            return cls(json.load(file))

    def save(self, directory: str) -> None:
        path = os.path.join(directory, FILE)
        with named(path), open(path, "w", encoding="utf-8") as file:
            json.dump(self.responses, file)

    def kl(self, scored: list[list[float]]) -> dict[str, float]:
        """``policy/kl_start`` and ``policy/kl_start_tokens``. ``scored``: an engine's log-probs now, as ``log_probs`` are."""
        difference = []
        for response, now in zip(self.responses, scored, strict=True):
            pairs = zip(response["mask"], response["log_probs"], now, strict=True)
            difference += [later - start for on, start, later in pairs if on]
        d = torch.tensor(difference, dtype=torch.float64).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return {"policy/kl_start": float((d.exp() - 1 - d).mean()), "policy/kl_start_tokens": float(len(d))}
