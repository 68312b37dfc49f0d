"""Where the time of a learner's step goes, measured on the real trainer without a change to it.

Phases are exclusive: while an inner one runs, the outer one's clock stands. A phase begins and ends with the device idle, so
asynchronous work is charged to the phase that started it. Quantizing is spread over a forward, layer by layer, where stopping
the device would cost more than the work: it is timed with events on the device and taken out of the phase around it.
"""

import time
from collections import Counter

import torch

OLD, TRAIN, OPTIMIZER, QUANTIZE, OTHER = "old log-probs", "forward and backward", "optimizer", "quantize", "other"
PHASES = (OLD, TRAIN, OPTIMIZER, QUANTIZE, OTHER)


class PhaseClock:
    """``seconds``: {phase: seconds} since ``reset``."""

    def __init__(self, device: torch.device):
        self.on_card = device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        self.seconds: Counter = Counter()
        self.stack: list[str] = []
        self.events: list[tuple] = []
        self.last = 0.0

    def phase(self, name: str, function):
        """``function``, its time charged to ``name``."""

        def timed(*args, **kwargs):
            self._lap()
            self.stack.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._lap()
                self.stack.pop()

        return timed

    def inside(self, name: str, function, when):
        """``function``, its device time charged to ``name`` and not to the phase around it, for calls where ``when(*args)``."""

        def timed(*args, **kwargs):
            if not self.stack or not when(*args):
                return function(*args, **kwargs)
            start = self._mark()
            result = function(*args, **kwargs)
            self.events.append((name, self.stack[-1], start, self._mark()))
            return result

        return timed

    def _mark(self):
        if not self.on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _lap(self) -> None:
        if self.on_card:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.last
        for name, around, start, end in self.events:
            took = start.elapsed_time(end) / 1e3 if self.on_card else end - start
            self.seconds[name] += took
            self.seconds[around] -= took
        self.events.clear()
        self.last = now


def attach(clock: PhaseClock, trainer) -> None:
    """Time the phases of a ``QarlActorTrainer``: its own methods, its strategy's optimizer step, its model's quantizer."""
    trainer.ppo_train = clock.phase(OTHER, trainer.ppo_train)
    trainer._set_old_log_probs = clock.phase(OLD, trainer._set_old_log_probs)
    trainer.training_step = clock.phase(TRAIN, trainer.training_step)
    trainer.strategy.optimizer_step = clock.phase(OPTIMIZER, trainer.strategy.optimizer_step)
    cache = trainer.actor.quant_cache
    cache.step_weight = clock.inside(QUANTIZE, cache.step_weight, lambda name, weight, *_: not cache.holds(name, weight))
