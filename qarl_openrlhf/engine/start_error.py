"""Why an engine did not start, or died: vLLM says "see root cause above", and above is a worker's log file."""

import os
import re

# "(Worker_TP1 pid=7) ERROR 11-28 07:32:49 [multiproc_executor.py:944] RuntimeError: no room", with or without the middle part.
_LINE = re.compile(
    r"^(?:\x1b\[[\d;]*m)*\(([A-Za-z]+)[^)]* pid=\d+\)(?:\x1b\[[\d;]*m)*(?: ERROR \S+ \S+ \[[^\]]+\])? "
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\w*: .+)$",
    re.MULTILINE,
)
_NO_CAUSE = ("initialization failed", "cancelled")
TAIL = 2**20  # bytes of a log that are read


def root_cause(text: str) -> str | None:
    """The first error that a process of an engine named in its log: a rank's before the core's."""
    found = [(who, error) for who, error in _LINE.findall(text) if not any(words in error for words in _NO_CAUSE)]
    ranked = [error for who, error in found if who.startswith("Worker")] or [error for _, error in found]
    return ranked[0] if ranked else None


def own_output() -> str:
    """The end of what this process and its children wrote, where it goes to files, as Ray's workers' does."""
    text = ""
    for descriptor in (1, 2):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - TAIL))
                text += file.read().decode(errors="replace")
        except OSError:  # a terminal, a pipe, a removed file
            continue
    return text


class EngineStartError(RuntimeError):
    """vLLM did not start. Names the error of the process that failed first."""


def explained(error: Exception) -> Exception:
    """``error``, or an EngineStartError with its cause where vLLM's message leaves that to a log."""
    cause = root_cause(own_output()) if "root cause" in str(error) else None
    return EngineStartError(f"vLLM did not start: {cause}") if cause else error


def why_dead() -> str:
    """": " and the error that an engine's process named before it ended; "" where it named none."""
    cause = root_cause(own_output())
    return f": {cause}" if cause else ""
