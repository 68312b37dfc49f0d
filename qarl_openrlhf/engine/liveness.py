"""Calls to an engine's process that end when the process does."""

import asyncio
from collections.abc import Callable

from qarl_openrlhf.patches.replacing import original, replace

POLL_S = 0.25


def fail_when_dead(llm, error: Callable[[], Exception]) -> None:
    """Make every call of ``llm`` (vLLM's ``AsyncLLM``) to its engine process raise ``error()`` if that process dies meanwhile.

    vLLM fails requests that were being sampled, but answers no other call (pause, sleep, collective_rpc ...) of a process that
    died: whoever awaits one would wait for ever. All of them go through this one method of the client. PatchError names what a vLLM
    lacks of it.
    """
    original(llm, "errored")
    core = original(llm, "engine_core")
    call = original(core, "call_utility_async")

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

    replace(core, "call_utility_async", guarded)
