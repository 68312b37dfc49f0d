"""How a process of a run ended, where Ray knows only that it did: a reward, computed in an engine's, may take it down.

A crash is in the process's log, by faulthandler, which Ray turns on in its workers; ``os._exit`` leaves no trace unless
:func:`tell_exits` was called. Imports neither vLLM nor OpenRLHF: a Ray task reads the log on the engine's node.
"""

import faulthandler
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

TAIL = 2**18  # bytes of a log that are read
_EXIT = "Process ended by os._exit"
_END = re.compile(rf"^(?:{re.escape(_EXIT)}\((?P<status>\d+)\)|Fatal Python error: (?P<fault>.+))$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_SIGNALS = {  # faulthandler's words
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}


@dataclass(frozen=True)
class ProcessEnd:
    """``what``: "exit code 3: os._exit at FILE:LINE in FUNCTION" or the like, None if nothing recorded it; ``log``: the process's, None without."""

    what: str | None
    log: str | None


def tell_exits() -> None:
    """From now on ``os._exit`` in this process, not in its forks, writes its status and its caller's stack to stderr first."""
    if getattr(os._exit, "_qarl", False):
        return
    end, owner = os._exit, os.getpid()

    def _exit(status):
        if os.getpid() == owner:
            os.write(2, f"{_EXIT}({status & 0xFF})\n".encode())
            faulthandler.dump_traceback(2, all_threads=False)
        end(status)

    _exit._qarl = True
    os._exit = _exit


def describe(text: str, files: list[str]) -> str | None:
    """The last end that a log tells of, None if it tells of none; where in ``files`` it happened, else where at all."""
    ends = list(_END.finditer(text))
    if not ends:
        return None
    end = ends[-1]
    if end["status"]:
        what = f"exit code {end['status']}: os._exit"
    else:
        number = _SIGNALS.get(end["fault"])
        what = f"exit code {-number} ({number.name}): {end['fault'].lower()}" if number else end["fault"]
    frames = [frame for frame in _FRAME.finditer(text, end.end()) if frame["file"] != __file__]
    own = {os.path.realpath(file) for file in files}
    frame = next((f for f in frames if os.path.realpath(f["file"]) in own), frames[0] if frames else None)
    return f"{what} at {frame['file']}:{frame['line']} in {frame['function']}" if frame else what


def read_end(pid: int, files: list[str]) -> ProcessEnd:
    """Of a dead Ray worker of this node; call it in a Ray worker, whose own log lies beside."""
    logs = Path(os.readlink("/proc/self/fd/2")).parent
    log = next(iter(sorted(logs.glob(f"worker-*-{pid}.err"))), None)
    if log is None:
        return ProcessEnd(None, None)
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return ProcessEnd(describe(file.read().decode(errors="replace"), files), str(log))
