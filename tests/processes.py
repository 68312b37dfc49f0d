"""What other processes are doing, by the titles that Ray and vLLM give them; any of them may end while it is asked."""

import time
from collections.abc import Callable

import psutil


def command_line(process: psutil.Process) -> str:
    """"ray::QarlPolicyActor.fit"; "" of one that has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def with_words(words: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those with ``words`` in their command line."""
    return [process for process in processes if words in command_line(process)]


def wait_for(words: str, processes: Callable[[], list[psutil.Process]], *, seconds: float = 10) -> psutil.Process:
    """The first with ``words`` in its command line, which a process may have for a moment not; AssertionError with what was there."""
    until = time.monotonic() + seconds
    while True:
        there = processes()
        if found := with_words(words, there):
            return found[0]
        assert time.monotonic() < until, f"no {words} among {[command_line(process) for process in there]}"
        time.sleep(0.1)
