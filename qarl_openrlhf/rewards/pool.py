"""Judging processes that any thread may use: an answer that takes too long costs its process, not the run.

A process is started when a thread needs one and none is idle, up to `size`. One that passes the limit, or dies, is killed and
its answer counts as wrong ("timeout" or "crash"); the next answer gets a new process. Threads wait, event loops do not: call
it from a thread (OpenRLHF calls reward functions in one).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
START_LIMIT_S = 180.0  # importing sympy on a machine whose cores all sample


class PoolError(RuntimeError):
    """A judging process cannot start at all: an installation error, not an answer's fault."""


class Process:
    """One `rewards.worker` and the pipe to it."""

    def __init__(self, seconds: float, memory_mb: int):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
        self.child = subprocess.Popen(
            # -P: a file of the current directory must not stand in for a library
            [sys.executable, "-P", "-m", "qarl_openrlhf.rewards.worker", str(seconds), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        # A library that chatters must not fill the pipe and stall; the last lines are what an error shows.
        self.complaints: list[bytes] = []
        threading.Thread(target=self._drain, daemon=True).start()
        if self.read(START_LIMIT_S) != "ready":
            self.kill()
            time.sleep(0.05)
            text = b"".join(self.complaints).decode(errors="replace")
            raise PoolError(f"the judging process does not start (is math-verify installed?): {text[-500:]}")

    def _drain(self) -> None:
        for line in self.child.stderr:
            self.complaints = [*self.complaints[-20:], line]

    def ask(self, answer: str, label: str, seconds: float) -> bool | str:
        """The verdict, or "timeout" or "crash" (then this process is of no use any more)."""
        try:
            self.child.stdin.write(json.dumps([answer, label]).encode() + b"\n")
        except OSError:
            return "crash"
        return self.read(seconds)

    def read(self, seconds: float):
        poller, line, end = select.poll(), b"", time.monotonic() + seconds
        poller.register(self.child.stdout.fileno(), select.POLLIN | select.POLLHUP)
        while not line.endswith(b"\n"):
            if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
                return "timeout"
            piece = os.read(self.child.stdout.fileno(), 4096)
            if not piece:
                return "crash"
            line += piece
        return json.loads(line)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stdout.close()


class JudgePool:
    """`judge(answer, label)` from any thread. seconds: of one answer; size: processes at most; memory_mb: of each."""

    def __init__(self, *, seconds: float = 5.0, size: int = 2, memory_mb: int = 2048):
        self.seconds, self.memory_mb, self.size = seconds, memory_mb, size
        self.places = threading.BoundedSemaphore(size)
        self.idle: list[Process] = []
        self.lock = threading.Lock()
        atexit.register(self.close)

    def judge(self, answer: str | None, label: str) -> tuple[bool, str]:
        """(right, "ok" | "no answer" | "timeout" | "crash")."""
        if answer is None:
            return False, "no answer"
        with self.places:
            with self.lock:
                process = self.idle.pop() if self.idle else None
            if process is not None and process.child.poll() is not None:  # died while idle, e.g. for the machine's memory
                process.kill()
                process = None
            process = process or Process(self.seconds, self.memory_mb)
            verdict = process.ask(answer, label, self.seconds)
            if not isinstance(verdict, bool):
                process.kill()
                return False, verdict
            with self.lock:
                self.idle.append(process)
            return verdict, "ok"

    def judge_all(self, answers: list[str | None], labels: list[str]) -> list[tuple[bool, str]]:
        """Many at once, in order."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(self.judge, answers, labels))

    def close(self) -> None:
        with self.lock:
            processes, self.idle = self.idle, []
        for process in processes:
            process.kill()


_pools: dict[tuple, JudgePool] = {}
_pools_lock = threading.Lock()


def shared_pool(*, seconds: float, size: int, memory_mb: int = 2048) -> JudgePool:
    """One pool a setting and process: OpenRLHF loads a reward file once an engine actor, tests many times."""
    with _pools_lock:
        key = (seconds, size, memory_mb)
        if key not in _pools:
            _pools[key] = JudgePool(seconds=seconds, size=size, memory_mb=memory_mb)
        return _pools[key]
