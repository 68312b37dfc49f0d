"""The last check of a publish: do engine and learner give the same text the same log-probabilities?

Checksums prove that the bytes arrived; the probe proves that the engine computes with them. A stale lm_head or a skipped
layer moves the mean |delta logp| of a sentence by tenths to nats, rounding moves it by hundredths, or by tenths where activations
have 8 bits too.
"""

import time
from collections.abc import Callable

import ray
import torch

from qarl_openrlhf.quant.linear import quantized_forward
from qarl_openrlhf.quant.ungathered import ungathered
from qarl_openrlhf.sync.routing import recorded_experts, topk_agreement

TEXT = "The sum of 7 and 5 is 12. A train that leaves at noon and travels for two hours arrives at 2 o'clock in the afternoon."


class ProbeError(RuntimeError):
    """An engine's log-probabilities are not the learner's after a publish. Names the engine and both figures."""


class LogprobProbe:
    """Compares prompt log-probs of a fixed text, at temperature 1, between the learner's quantized forward and each engine.

    Args:
        max_tokens: what the engine takes as a prompt (its context less one token).
        tolerance: largest mean |delta logp| a token, in nats, that still counts as the same weights.
        barrier: given where the engines' KV caches sleep (``--vllm.enable_sleep``: a push wakes the weights only). They are woken
            once all learners have passed it, and stay awake: what comes next is a rollout.
    """

    def __init__(
        self, tokenizer, *, max_tokens: int, tolerance: float, timeout_s: float, barrier: Callable[[], None] | None = None
    ):
        self.ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:max_tokens]
        self.tolerance = tolerance
        self.timeout_s = timeout_s
        self.barrier = barrier

    def run(self, actor, engines: list, version: int, *, is_sender: bool) -> dict:
        """All ranks call it (ZeRO-3 gathers in the forward); the sending rank asks the engines.

        Returns ``sync/probe_abs_logp``, ``sync/probe_ms`` and, of a mixture-of-experts model,
        ``mismatch/router_topk_agreement``.
        """
        started = time.perf_counter()
        with recorded_experts(actor.network) as experts:
            mine = self.learner_log_probs(actor)
        if self.barrier is not None:  # what the learners do not use is the KV caches' now
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.barrier()
        if not is_sender:
            return {}
        if self.barrier is not None:
            ray.get([engine.wake_up.remote(tags=["kv_cache"]) for engine in engines], timeout=self.timeout_s)
        refs = [engine.probe_logprobs.remote([self.ids]) for engine in engines]
        worst = 0.0
        for index, theirs in enumerate(ray.get(refs, timeout=self.timeout_s)):
            gap = float((mine - torch.tensor(theirs[0])).abs().mean())
            if not gap <= self.tolerance:  # a NaN must fail, too
                raise ProbeError(
                    f"engine {index} disagrees with the learner after publishing version {version}: mean |delta logp| "
                    f"{gap:.4f} over {len(mine)} tokens, at most {self.tolerance} allowed (--sync.probe_tol). Its weights "
                    "are not the learner's, or the two compute differently; no rollout is made."
                )
            worst = max(worst, gap)
        metrics = {"sync/probe_abs_logp": worst}
        if experts:
            metrics |= self._router_agreement(experts, engines)
        return metrics | {"sync/probe_ms": (time.perf_counter() - started) * 1e3}

    def _router_agreement(self, experts: dict, engines: list) -> dict:
        """``mismatch/router_topk_agreement`` of the engine that agrees least; nothing where engines do not tell."""
        theirs = ray.get([engine.probe_routing.remote([self.ids]) for engine in engines], timeout=self.timeout_s)
        told = [topk_agreement(experts, torch.tensor(routing[0])) for routing in theirs if routing is not None]
        return {"mismatch/router_topk_agreement": min(told)} if told else {}

    @torch.no_grad()
    def learner_log_probs(self, actor) -> torch.Tensor:
        """float32 [len(ids) - 1]: log p(ids[t+1] | ids[:t+1]) of the quantized weights, also in a ``:rollout`` arm."""
        ids = torch.tensor([self.ids], device=actor.network.device)
        with quantized_forward(actor.network), ungathered(actor.model, actor.network):
            logits = actor.model(ids, attention_mask=torch.ones_like(ids))["logits"][0, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
