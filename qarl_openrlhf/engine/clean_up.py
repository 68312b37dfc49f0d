"""The clean-up after a failed weight update, however long the engine's workers take to answer."""

import asyncio
from collections.abc import Awaitable, Callable

# How long the failed update waits for it. With gloo, a worker may wait for a peer as long as --sync.timeout_s.
WAIT_S = 5.0
RETRY_S = 1.0


class CleanUp:
    """Attributes:
    lock: held while the engine is being cleaned up; whoever begins a new session takes it.
    """

    def __init__(self):
        self.lock = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()  # asyncio itself keeps no reference to a task

    async def run(self, engine: str, steps: Callable[[], Awaitable], wanted: Callable[[], bool]) -> None:
        """``steps()``, in the background after ``WAIT_S``, and again while they time out and are still ``wanted()``.

        Without them requests that the update has frozen would wait for ever. engine: its name.
        """
        task = asyncio.ensure_future(self._until_done(engine, steps, wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=WAIT_S)

    async def _until_done(self, engine: str, steps: Callable[[], Awaitable], wanted: Callable[[], bool]) -> None:
        while True:
            async with self.lock:
                if not wanted():
                    return
                try:
                    await steps()
                    return
                except Exception as error:
                    print(f"{engine}: clean-up after a failed weight update: {type(error).__name__}: {error}", flush=True)
                    if not isinstance(error, TimeoutError):
                        return
            await asyncio.sleep(RETRY_S)
