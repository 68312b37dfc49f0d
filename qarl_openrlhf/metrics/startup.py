"""One line for each thing that the start of a run waits for: minutes of silence look like a run that hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Startup:
    """``show(line, flush=True)`` gets ``start: WHAT ...`` when waiting begins and ``start: WHAT, SECONDS`` when it is over."""

    def __init__(self, show: Callable = print):
        self.show = show
        self.watchers: list[threading.Thread] = []

    @contextmanager
    def waiting(self, what: str, done: str) -> Iterator[None]:
        """Around something that blocks; nothing more is said if it fails, since the error is."""
        started = self._begin(what)
        yield
        self._end(done, started)

    def watch(self, what: str, done: str, refs: list) -> None:
        """Ray object refs that someone else waits for: say when all are there. An error is left to whoever waits."""
        started = self._begin(what)

        def wait():
            import ray

            try:
                ray.get(refs)
            except Exception:  # of the actor, or of a Ray that has been shut down
                return
            self._end(done, started)

        self.watchers.append(threading.Thread(target=wait, name=f"qarl-start-{what}", daemon=True))
        self.watchers[-1].start()

    def _begin(self, what: str) -> float:
        self.show(f"start: {what} ...", flush=True)
        return time.monotonic()

    def _end(self, done: str, started: float) -> None:
        self.show(f"start: {done}, {time.monotonic() - started:.0f} s", flush=True)
