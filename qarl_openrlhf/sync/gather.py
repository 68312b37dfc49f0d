"""Whole parameters of a ZeRO-3 learner, one layer at a time, and how long the gathering takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimedGather:
    """``deepspeed.zero.GatheredParameters`` that adds the time it takes on the host (not what is done meanwhile) to ``seconds``."""

    def __init__(self):
        self.seconds = 0.0

    @contextmanager
    def __call__(self, parameters: list) -> Iterator[None]:
        import deepspeed

        started = time.perf_counter()
        with deepspeed.zero.GatheredParameters(parameters):
            self.seconds += time.perf_counter() - started
            yield
            started = time.perf_counter()
        self.seconds += time.perf_counter() - started
