"""Which weights an engine has: the state machine that keeps rollouts off half-updated weights."""

import asyncio
import enum


class EngineNotReady(RuntimeError):
    """The engine has no complete set of published weights. Names the engine, its state and the reason."""


class Weights(enum.Enum):
    EMPTY = "EMPTY"  # dummy weights, nothing published yet
    UPDATING = "UPDATING"
    READY = "READY"
    FAILED = "FAILED"  # an update broke off: some layers may be new, some old


class WeightState:
    """EMPTY -> UPDATING -> READY(version) | FAILED(reason); a complete update heals FAILED.

    Attributes:
        version: of the last complete update, None before the first.
        failures: how often an update has failed.
        settled: set while no update is under way.
    """

    def __init__(self):
        self.state = Weights.EMPTY
        self.version: int | None = None
        self.reason: str | None = None
        self.failures = 0
        self.settled = asyncio.Event()
        self.settled.set()
        self._live = False
        self._begun: int | None = None

    def begin(self, version: int) -> None:
        if self.state is Weights.UPDATING:
            raise RuntimeError(f"update {version} begun while another one is under way; abort that one first")
        self._live, self._begun = self.state is Weights.READY, version
        self.state, self.reason = Weights.UPDATING, f"version {version} is being published"
        self.settled.clear()

    def complete(self, version: int) -> None:
        if self.state is not Weights.UPDATING or version != self._begun:
            raise RuntimeError(f"update {version} finished in state {self.state.value} ({self.reason})")
        self.state, self.version, self.reason = Weights.READY, version, None
        self.settled.set()

    def fail(self, reason: str) -> None:
        if self.state is not Weights.FAILED:  # the first reason is the cause
            self.reason = reason
        self.state = Weights.FAILED
        self.failures += 1
        self.settled.set()

    async def wait_ready(self, engine: str, timeout_s: float) -> int:
        """Return ``failures`` if READY; wait for the end of an update of a live engine (asynchronous training); else EngineNotReady."""
        if self.state is Weights.UPDATING and self._live:
            try:
                await asyncio.wait_for(self.settled.wait(), timeout_s)
            except TimeoutError:
                pass
        if self.state is Weights.READY:
            return self.failures
        hint = {
            Weights.EMPTY: "it was started with dummy weights and nothing has been published to it",
            Weights.UPDATING: f"{self.reason}, and it has no complete weights to fall back on",
            Weights.FAILED: f"its last weight update failed ({self.reason}); publish again",
        }[self.state]
        raise EngineNotReady(f"{engine} refuses to generate: weights are {self.state.value}, {hint}")

    def require_whole(self, engine: str, failures: int) -> None:
        """EngineNotReady if an update has failed since :meth:`wait_ready` returned ``failures``.

        The failure aborts what the engine's core has, but a request may still be on its way there, and is computed afterwards.
        """
        if failures != self.failures:
            why = self.reason or "another one has been published since"
            raise EngineNotReady(f"{engine} aborted a request: a weight update failed while it was under way ({why})")

    def to_dict(self) -> dict:
        return {"state": self.state.value, "version": self.version, "reason": self.reason}
