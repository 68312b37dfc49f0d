"""Calls to an engine's process that end when the process does."""

import asyncio
from collections.abc import Callable

POLL_S = 0.25


def fail_when_dead(llm, error: Callable[[], Exception]) -> None:
    """Make every call of ``llm`` (vLLM's ``AsyncLLM``) to its engine process raise ``error()`` if that process dies meanwhile.

    vLLM fails requests that were being sampled, but answers no other call (pause, sleep, collective_rpc ...) of a process that
    died: whoever awaits one would wait for ever. All of them go through this one method of the client.
    """
    core = llm.engine_core
    call = core.call_utility_async

    async def guarded(method: str, *args):
        task = asyncio.ensure_future(call(method, *args))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if not task.done() and llm.errored:
                    raise error()
            return task.result()
        finally:
            task.cancel()

    core.call_utility_async = guarded
