"""Why an engine did not start, or died: vLLM says "see root cause above", and above is a worker's log file."""

import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from qarl_openrlhf.engine.user_file import load_error

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


def own_logs() -> list[str | None]:
    """The files that this process and its children write standard output and error to, as Ray's workers do; None for a terminal, a
    pipe, a removed file."""
    paths = (os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in (1, 2))
    return [path if os.path.isfile(path) else None for path in paths]


def written_so_far() -> list[int]:
    """Bytes in each of :func:`own_logs`."""
    return [os.path.getsize(path) if path else 0 for path in own_logs()]


def own_output(since: Sequence[int] = (0, 0)) -> list[str]:
    """What :func:`own_logs` got after so many bytes, at most the last TAIL of it."""
    texts = []
    for path, start in zip(own_logs(), since, strict=True):
        if path:
            with open(path, "rb") as file:
                file.seek(max(start, os.path.getsize(path) - TAIL))
                texts.append(file.read().decode(errors="replace"))
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
            name = _signal_name(-process.exitcode)
            why = ", by hand or by the kernel for want of main memory" if name == "SIGKILL" else ""
            return f"its process (pid {process.pid}) was ended by {name}{why}"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time ones have none but the first and the last
        return f"signal {number}"


def explained(error: Exception, before: list[int], name: str = "engine", processes: list[BaseProcess] = ()) -> Exception:
    """``error``, or an EngineStartError with its cause where vLLM's message leaves that to a log.

    before: :func:`written_so_far` of before the start; of a cause up to there nothing is said. processes: those of the engine, whose end is
    told where no log names a cause.
    """
    written = "\n".join(own_output(before))
    cause = (root_cause(written) or end_of(processes)) if "root cause" in str(error) else None
    return EngineStartError(f"{name}: vLLM did not start: {cause}") if cause else error


async def started(start: Callable[[], Awaitable], name: str = "engine") -> None:
    """Await ``start()``; again, at most ATTEMPTS times, where a port that vLLM had found free was taken before it listened.

    vLLM lets go of the port it chose and listens on it seconds later. On a host where many runs start together others, Ray's
    connections too, get the same from the system meanwhile: one start in 24 failed of it.

    What a user's file raises while it is loaded is told as such and not tried again; ``sys.exit`` there, too, which Ray would take for
    an end of the actor that was asked for.
    """
    for attempt in range(1, ATTEMPTS + 1):
        before = written_so_far()
        try:
            with noted_processes() as processes:
                await start()
            return
        except (Exception, SystemExit) as error:
            if found := load_error(error):
                raise found from error
            if not isinstance(error, RuntimeError):  # PyTorch's DistNetworkError is one
                raise
            found = explained(error, before, name, processes)
            if attempt == ATTEMPTS or not _PORT_TAKEN.search(str(found)):
                raise found from error
            print(f"vLLM did not start, another process took its port: once more ({found})", flush=True)


def why_dead() -> str:
    """": " and the error that an engine's process named before it ended; "" where it named none."""
    cause = root_cause("\n".join(own_output()))
    return f": {cause}" if cause else ""
