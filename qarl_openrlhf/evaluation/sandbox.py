"""Run programs that a model wrote, each in a process with limits and without a network; see `sandbox_child.py` for the walls.

What it protects from: a program that loops, fills the memory, forks, opens connections, writes or deletes files, signals other
processes, or prints without end. What it does not: a program can read every file that this user can read (and can send it
nowhere), it shares the kernel, whose faults it may use, and it takes the CPU time and memory it is allowed. For programs of
somebody who attacks you, rather than of a model that errs, use a virtual machine.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.evaluation.sandbox_child import MEMORY, UNPROTECTED

CHILD = Path(__file__).with_name("sandbox_child.py")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}
ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1"}
OUTPUT_BYTES = 64 * 2**20
COMPLAINT_BYTES = 2**16


@dataclass(frozen=True)
class Limits:
    """Of one run. seconds: CPU time (LiveCodeBench's own limit is 6); the wall clock allows twice as much and 5 s, so that a
    busy machine makes no answer wrong. memory_mb: address space, MiB."""

    seconds: int = 6
    memory_mb: int = 4096

    @property
    def wall_s(self) -> float:
        return 2 * self.seconds + 5.0


@dataclass(frozen=True)
class Outcome:
    """status: "ok", "error" (an exception, or a signal), "timeout", "memory" or "output" (more than OUTPUT_BYTES).
    stdout: what was written; detail: last line of stderr."""

    status: str
    stdout: bytes
    detail: str


def run(
    program: str, stdin: str = "", *, function: str | None = None, arguments: list | None = None, limits: Limits = Limits()
) -> Outcome:
    """DataError where the process could not be walled in (then nothing has run)."""
    request = {
        "program": program,
        "function": function,
        "arguments": arguments,
        "cpu_s": limits.seconds,
        "memory_mb": limits.memory_mb,
    }
    with (
        tempfile.TemporaryFile() as ask,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryDirectory(prefix="qarl-code-") as empty,
    ):
        ask.write(json.dumps(request).encode())
        given.write(stdin.encode("utf-8", errors="surrogatepass"))
        ask.seek(0), given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), str(ask.fileno())],
            stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[ask.fileno()], cwd=empty,
            start_new_session=True, env=ENVIRONMENT,
        )  # fmt: skip
        try:
            stdout, stderr, why = _read(child, time.monotonic() + limits.wall_s)
        finally:
            _kill(child)
    detail = stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
    if child.returncode == UNPROTECTED:
        raise DataError(f"generated programs cannot be walled in here, so none is run: {detail}")
    return Outcome(why or _status(child.returncode), stdout, detail)


def _status(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):  # RLIMIT_CPU's soft and hard end
        return "timeout"
    return {0: "ok", MEMORY: "memory"}.get(code, "error")


def _read(child: subprocess.Popen, deadline: float) -> tuple[bytes, bytes, str | None]:
    """(stdout, stderr, "timeout" or "output" if the reading was broken off)."""
    pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    sizes = {"stdout": 0, "stderr": 0}
    why = None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, "stdout")
        selector.register(child.stderr, selectors.EVENT_READ, "stderr")
        while selector.get_map() and why is None:
            left = deadline - time.monotonic()
            if left <= 0:
                why = "timeout"
            for key, _ in selector.select(max(0.0, left)):
                piece = os.read(key.fd, 2**16)
                if not piece:
                    selector.unregister(key.fileobj)
                    continue
                sizes[key.data] += len(piece)
                if key.data == "stdout" and sizes["stdout"] > OUTPUT_BYTES:
                    why = "output"
                elif key.data == "stdout" or sizes["stderr"] <= COMPLAINT_BYTES:
                    pieces[key.data].append(piece)
    if why is None:  # both ends are closed; a program may have closed them and go on
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            why = "timeout"
    return b"".join(pieces["stdout"]), b"".join(pieces["stderr"]), why


def _kill(child: subprocess.Popen) -> None:
    """The process and whatever is in its session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    child.stdout.close(), child.stderr.close()


TRIES = """
import os, socket
for name, attempt in (
    ("a socket", lambda: socket.socket()),
    ("a file", lambda: open("made", "w")),
    ("a signal", lambda: os.kill(os.getppid(), 0)),
    ("a process", lambda: os.fork()),
    ("a program", lambda: os.execv("/bin/true", ["true"])),
):
    try:
        attempt()
        print(name, flush=True)
    except OSError:
        pass
print("end")
"""


def require() -> None:
    """DataError unless the walls stand on this machine: tried out, not looked up."""
    outcome = run(TRIES)
    if outcome.status != "ok" or outcome.stdout != b"end\n":
        got = ", ".join(outcome.stdout.decode().split("\n")[:-1]) or outcome.detail or outcome.status
        raise DataError(
            f"generated programs cannot be walled in here, so none is run: a test program got {got}; Linux on x86-64 with seccomp is needed"
        )
