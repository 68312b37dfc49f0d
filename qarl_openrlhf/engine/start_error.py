"""Why an engine did not start, or died: vLLM says "see root cause above", and above is a worker's log file."""

import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

# "(Worker_TP1 pid=7) ERROR 11-28 07:32:49 [multiproc_executor.py:944] RuntimeError: no room", with or without the middle part.
_LINE = re.compile(
    r"^(?:\x1b\[[\d;]*m)*\(([A-Za-z]+)[^)]* pid=\d+\)(?:\x1b\[[\d;]*m)*(?: ERROR \S+ \S+ \[[^\]]+\])? "
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\w*: .+)$",
    re.MULTILINE,
)
_NO_CAUSE = ("initialization failed", "cancelled")
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use|failed to listen on any local network address")
ATTEMPTS = 3
TAIL = 2**20  # bytes of a log that are read
END_S = 5  # from the end of a process, as vLLM noticed it, to its exit code


def root_cause(text: str) -> str | None:
    """The first error that a process of an engine named in its log: a rank's before the core's."""
    found = [(who, error) for who, error in _LINE.findall(text) if not any(words in error for words in _NO_CAUSE)]
    ranked = [error for who, error in found if who.startswith("Worker")] or [error for _, error in found]
    return ranked[0] if ranked else None


def own_output() -> list[str]:
    """The ends of what this process and its children wrote to standard output and error, where these go to files, as Ray's
    workers' do."""
    texts = []
    for descriptor in (1, 2):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - TAIL))
                texts.append(file.read().decode(errors="replace"))
        except OSError:  # a terminal, a pipe, a removed file
            texts.append("")
    return texts


class EngineStartError(RuntimeError):
    """vLLM did not start. Names the engine, and the error of the process that failed first, or the signal that ended it."""


@contextmanager
def noted_processes() -> Iterator[list[BaseProcess]]:
    """What multiprocessing starts here meanwhile: vLLM gives up before a killed process has its exit code, and keeps none."""
    noted, start = [], BaseProcess.start

    def noting(process: BaseProcess) -> None:
        start(process)
        noted.append(process)

    BaseProcess.start = noting
    try:
        yield noted
    finally:
        BaseProcess.start = start


def end_of(processes: list[BaseProcess]) -> str | None:
    """How the first of them that failed ended, with its pid; None where none did."""
    for process in processes:
        process.join(END_S)
        if process.exitcode:
            if process.exitcode > 0:
                return f"its process (pid {process.pid}) ended with exit code {process.exitcode}"
            name = signal.Signals(-process.exitcode).name
            why = ", by hand or by the kernel for want of main memory" if name == "SIGKILL" else ""
            return f"its process (pid {process.pid}) was ended by {name}{why}"
    return None


def explained(error: Exception, before: list[str], name: str = "engine", processes: list[BaseProcess] = ()) -> Exception:
    """``error``, or an EngineStartError with its cause where vLLM's message leaves that to a log.

    before: :func:`own_output` of before; of a cause in there nothing is said. processes: those of the engine, whose end is
    told where no log names a cause.
    """
    written = "\n".join(text.removeprefix(old) for text, old in zip(own_output(), before, strict=True))
    cause = (root_cause(written) or end_of(processes)) if "root cause" in str(error) else None
    return EngineStartError(f"{name}: vLLM did not start: {cause}") if cause else error


async def started(start: Callable[[], Awaitable], name: str = "engine") -> None:
    """Await ``start()``; again, at most ATTEMPTS times, where a port that vLLM had found free was taken before it listened.

    vLLM lets go of the port it chose and listens on it seconds later. On a host where many runs start together others, Ray's
    connections too, get the same from the system meanwhile: one start in 24 failed of it.
    """
    for attempt in range(1, ATTEMPTS + 1):
        before = own_output()
        try:
            with noted_processes() as processes:
                await start()
            return
        except RuntimeError as error:  # PyTorch's DistNetworkError is one
            found = explained(error, before, name, processes)
            if attempt == ATTEMPTS or not _PORT_TAKEN.search(str(found)):
                raise found from error
            print(f"vLLM did not start, another process took its port: once more ({found})", flush=True)


def why_dead() -> str:
    """": " and the error that an engine's process named before it ended; "" where it named none."""
    cause = root_cause("\n".join(own_output()))
    return f": {cause}" if cause else ""
