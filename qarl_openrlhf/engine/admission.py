"""Requests of one rollout enter the engine together and in order, so that the same seed gives the same responses."""

import asyncio
from collections.abc import Awaitable, Callable

Slot = tuple[int, int]  # (number of the prompt, number of the sample)


class Admission:
    """Holds the first request of each sample of a dispatch until all are there, then lets them in by slot.

    What an engine computes depends, in its last bits, on which requests share a forward pass, and what it samples on the order
    in which they draw from its random generator. Prompts arrive one Ray call each and are tokenized side by side, in an order
    that differs from run to run. Here the engine is paused while they enter, and seeded for the dispatch, so that scheduling,
    and with it every token and log-prob, repeats. An engine that still works on earlier requests is neither paused nor seeded.

    Args:
        llm: vLLM's ``AsyncLLM``.
        ready: returns when the engine may generate, raises if it cannot.
        patience_s: how long a dispatch may wait for its last sample, e.g. for an agent that prepares its environment. The others
            go ahead then, and what they sample does not repeat.
    """

    def __init__(self, llm, ready: Callable[[], Awaitable[None]], patience_s: float = 10.0):
        self.llm, self.ready, self.patience_s = llm, ready, patience_s
        self.lock = asyncio.Lock()  # held while requests enter; a weight update begins under it
        self._dispatches: dict[str, _Dispatch] = {}
        self._tasks: set[asyncio.Task] = set()

    def expect(self, dispatch: str, slots: list[Slot], seed: int) -> None:
        """The samples that a dispatch has in this engine, and the seed of the engine's random generators for it."""
        here = self._here(dispatch)
        here.expected, here.seed = set(slots), seed
        here.check()
        task = asyncio.ensure_future(self._let_in(dispatch, here))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def enter(self, dispatch: str, slot: Slot) -> None:
        """Wait for this sample's turn."""
        here = self._here(dispatch)
        here.seen.add(slot)
        if here.open:
            self._forget(dispatch, here)
            return
        turn = here.waiting[slot] = asyncio.get_running_loop().create_future()
        here.check()
        await turn

    def left(self, dispatch: str, slot: Slot) -> None:
        """This sample will not ask, or will not ask again: it is done, or it failed."""
        here = self._here(dispatch)
        here.seen.add(slot)
        here.done.add(slot)
        here.check()
        self._forget(dispatch, here)

    def _here(self, dispatch: str) -> "_Dispatch":
        return self._dispatches.setdefault(dispatch, _Dispatch())

    def _forget(self, dispatch: str, here: "_Dispatch") -> None:
        if here.open and here.expected is not None and here.done >= here.expected:
            self._dispatches.pop(dispatch, None)

    async def _let_in(self, dispatch: str, here: "_Dispatch") -> None:
        try:
            await asyncio.wait_for(here.complete.wait(), self.patience_s)
        except TimeoutError:
            print(f"{len(here.expected - here.seen)} of {len(here.expected)} samples are late: the others go ahead", flush=True)
        try:
            async with self.lock:
                await self.ready()
                await self._enter_in_order(here)
        except Exception as error:  # whoever waits gets it; nothing else would tell them
            for turn in here.waiting.values():
                if not turn.done():
                    turn.set_exception(error)
        here.open = True
        for turn in here.waiting.values():
            if not turn.done():  # it came while the others entered: nobody else would let it in
                turn.set_result(None)
        self._forget(dispatch, here)

    async def _enter_in_order(self, here: "_Dispatch") -> None:
        alone = self._unfinished() == 0
        if alone:
            # No requests, no caches: nothing of what came before is left to depend on.
            await self.llm.pause_generation(mode="keep", clear_cache=True)
        try:
            if alone:
                await self.llm.collective_rpc("qarl_seed", args=(here.seed,))
            for slot, turn in sorted(here.waiting.items()):
                before = self._unfinished()
                if not turn.done():
                    turn.set_result(None)
                while alone and self._unfinished() == before and slot not in here.done:
                    await asyncio.sleep(0)  # it is on its way through vLLM's input processing
        finally:
            if alone:
                await self.llm.resume_generation()

    def _unfinished(self) -> int:
        return self.llm.output_processor.get_num_unfinished_requests()


class _Dispatch:
    def __init__(self):
        self.expected: set[Slot] | None = None  # not yet announced
        self.seed = 0
        self.waiting: dict[Slot, asyncio.Future] = {}
        self.seen: set[Slot] = set()
        self.done: set[Slot] = set()
        self.open = False  # who comes now goes straight in
        self.complete = asyncio.Event()

    def check(self) -> None:
        if self.expected is not None and self.seen >= self.expected:
            self.complete.set()
