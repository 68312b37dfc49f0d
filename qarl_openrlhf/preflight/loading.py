"""Does a user's Python file load? Tried in a process of its own, which takes everything that the file starts with it when it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from qarl_openrlhf.config import ConfigError

CHILD = Path(__file__).with_name("loading_child.py")
PACKAGE = Path(__file__).parents[1]
MARK = "QARL_LOADING"  # in the environment of the process and of whatever it starts
MODULES = {"reward_func": "reward_func", "AgentExecutor": "agent_module"}  # what OpenRLHF calls the module of a file with such a name
LIMIT_S = 60.0
LEAVE_S = 5.0  # for what the file has registered with atexit


def check_loads(flag: str, path: str, name: str) -> None:
    """ConfigError with the error that the engines would end the run with, minutes later, if ``path`` raises, or ends its process,
    while it is loaded, or has no ``name`` then. Each engine loads it, too, so once more does no harm.

    Nothing where it cannot be told here: engines may run on other machines, an error may be of Ray or of a GPU, which this process
    lacks, and a file may take longer than ``LIMIT_S`` (a note says so). This package's own files are not tried.
    """
    if os.environ.get("RAY_ADDRESS") or Path(path).resolve().is_relative_to(PACKAGE):
        return
    with tempfile.TemporaryDirectory(prefix="qarl-load-") as scratch:
        answer = Path(scratch, "answer.json")
        request = {"flag": flag, "path": path, "module": MODULES[name], "name": name}
        request |= {"sys_path": sys.path, "parent": os.getpid(), "answer": str(answer)}
        mark = uuid.uuid4().hex
        child = subprocess.Popen(
            [sys.executable, "-P", "-B", CHILD, json.dumps(request)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {MARK: mark, "RAY_ENABLE_AUTO_CONNECT": "0"},  # no cluster of its own
        )  # fmt: skip
        try:
            done = _wait(child, answer)
            if answer.exists():
                problem = json.loads(answer.read_text(encoding="utf-8"))["error"]
            else:
                problem = _silent_end(flag, path, child.returncode) if done else None
        finally:
            _end(child, mark)
    if problem:
        raise ConfigError(problem)
    if not done:
        print(f"note: --{flag} {path} takes more than {LIMIT_S:g} s to load, so whether it does is left to the engines")


def _wait(child: subprocess.Popen, answer: Path) -> bool:
    """Whether there is an answer, or an end, in time."""
    until = time.monotonic() + LIMIT_S
    while not answer.exists():
        if child.poll() is not None:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        child.wait(LEAVE_S)
    return True


def _silent_end(flag: str, path: str, code: int) -> str | None:
    """What to say of a process that ended with ``code`` and no answer; None if somebody else, the kernel for one, ended it."""
    if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        return None
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return f"--{flag} {path}: it ended its process with {how} (while the file was loaded)"


def _end(child: subprocess.Popen, mark: str) -> None:
    """The process and all that it has started, in its session or with its environment."""
    for _ in range(100):
        left = [process for process in psutil.process_iter() if _started(process, child.pid, mark)]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if not left:
            break
        time.sleep(0.02)
    child.wait()


def _started(process: psutil.Process, session: int, mark: str) -> bool:
    try:
        ours = os.getsid(process.pid) == session or process.environ().get(MARK) == mark
        return ours and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # another user's, or gone
        return False
