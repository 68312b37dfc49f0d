"""What the learner watches of a rollout beside its objective: histograms, a few responses token by token, error tokens.

No forward of its own: everything is computed from log-probs that the step has anyway. ``timing/diagnostics`` says what it costs.
"""

import time
from contextlib import contextmanager

import torch

from qarl_openrlhf.metrics import error_tokens, histograms, mismatch, weight_lag
from qarl_openrlhf.metrics.accumulate import Sums
from qarl_openrlhf.metrics.token_records import TokenRecorder


class Diagnostics:
    """One rollout at a time: ``begin``, then ``sampled`` for each micro-batch, ``updated`` for each training forward, ``end``.

    ``record``: what the last rollout left for the run directory, {"histograms": sparse counts, "tokens": records}.
    """

    def __init__(self, device: torch.device, tokenizer=None):
        self.device, self.tokenizer = device, tokenizer
        self.record: dict = {}

    def begin(self, objective=None) -> None:
        self.seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.histograms = histograms.Histograms(self.device)
        self.recorder = TokenRecorder(self.tokenizer, objective)

    @torch.no_grad()
    def sampled(self, batch, sums: Sums, version: int | None = None) -> None:
        """A micro-batch with its old log-probs: how far learner and sampler are apart, error tokens.

        version: of the weights the old log-probs are from; with it, how old the sampler's were.
        """
        if batch.rollout_log_probs is None:
            return
        with self._timed():
            mask = batch.action_mask.bool()
            sums.merge(mismatch.statistics(batch.action_log_probs, batch.rollout_log_probs, mask))
            sums.merge(error_tokens.statistics(batch))
            if version is not None and batch.weight_versions is not None:
                sums.merge(weight_lag.statistics(batch.weight_versions, mask, version))
            self.histograms.add_mismatch(batch.action_log_probs, batch.rollout_log_probs.float(), batch.advantages, mask)

    @torch.no_grad()
    def updated(self, batch, log_probs: torch.Tensor, states, update: int) -> None:
        """A training forward: current log-probs float32 [B, A], the objective's ``TokenStates`` (None without an objective)."""
        with self._timed():
            mask = batch.action_mask.bool()
            self.histograms.add_update(log_probs, batch.action_log_probs, batch.advantages, mask, states)
            self.recorder.offer(batch, log_probs, states, update)

    @torch.no_grad()
    def end(self) -> dict[str, float]:
        """Metrics over all ranks (every rank must call it); ``record`` holds this rank's responses and everyone's counts."""
        with self._timed():
            counts = self.histograms.over_ranks()
            self.record = {"histograms": histograms.sparse(counts), "tokens": self.recorder.records()}
            metrics = histograms.out_of_band_fractions(counts["region"])
        if self._events:
            self._events[-1][1].synchronize()
        self.seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
        return metrics | {"timing/diagnostics": self.seconds}

    @contextmanager
    def _timed(self):
        if self.device.type != "cuda":
            started = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - started
            return
        # On the card's own clock: what the step has queued before is not ours, and nobody waits for it here.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))
