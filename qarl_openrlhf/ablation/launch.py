"""How one run of a plan is started, followed and ended: as a process here, or as a job of a Ray cluster."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Callable

from qarl_openrlhf.ablation.plan import PlannedRun, PlanError
from qarl_openrlhf.metrics.progress import follow

LOG = "train.log"
GRACE_S = 20  # from asking a run to end to killing it
REST_S = 5  # from the end of a run's first process to killing what it left
POLL_S = 0.2
PATIENCE_S = 600  # with a Ray dashboard that does not answer
Launch = Callable[[PlannedRun, list[str], threading.Event], int]
"""Starts a run with these flags and waits for its exit status. When the event is set it ends the run and raises ``Stopped``:
signals reach the main thread only, and runs are waited for in others."""


class Stopped(Exception):
    """The run was ended because the ablation is; it is neither finished nor failed."""


def launch_here(run: PlannedRun, flags: list[str], stop: threading.Event, *, lock: int | None = None) -> int:
    """train_qarl in a session of its own, output in ``train.log``, its steps shown here; returns the exit status.

    lock: file descriptor of ``only_one_in``, which the run keeps open for as long as it lives. What it starts with ``subprocess``,
    such as Ray's daemons, does not get it.
    """
    prefix = f"  {run.identity.arm} seed {run.identity.seed}  "
    ended = threading.Event()
    watcher = threading.Thread(
        target=follow, args=(str(run.directory), ended, lambda line, flush: print(prefix + line, flush=flush)), daemon=True
    )
    if stop.is_set():
        raise Stopped
    with open(run.directory / LOG, "ab") as log:
        command = [*run.command[: -len(run.flags)], *flags]
        log.write(f"\n$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )  # fmt: skip
        try:
            watcher.start()
            while process.poll() is None:
                if stop.wait(POLL_S):
                    raise Stopped
            return process.returncode
        finally:
            if process.poll() is None:
                _end(process)
            ended.set()
            watcher.join(timeout=5)


def _end(process: subprocess.Popen) -> None:
    """Ask the process and its group to end, then make them. SIGTERM: a shell's background jobs, and their children, ignore SIGINT."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            deadline = time.monotonic() + REST_S
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)  # raises when the group is empty
                time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ray_job_launcher(address: str, poll_s: float = 5.0) -> Launch:
    """A function that submits a run to the Ray cluster at ``address`` (its dashboard, http://HOST:8265) and waits for its end.

    The run directory must be on a file system that the cluster shares, and qarl_openrlhf be installed there.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlanError(f"--ray_address {address}: {error}") from None

    def launch(run: PlannedRun, flags: list[str], stop: threading.Event) -> int:
        if stop.is_set():
            raise Stopped
        # The cluster has its own Python.
        job = client.submit_job(entrypoint=shlex.join(["python", *run.command[1 : -len(run.flags)], *flags]))
        try:
            while not (status := _answer(client.get_job_status, job, stop, poll_s)).is_terminal():
                if stop.wait(poll_s):
                    raise Stopped
        except BaseException:
            _stop_job(client, job)
            raise
        # The run is over, however it went: what the dashboard does not tell of it must not make it another's end.
        try:
            log = _answer(client.get_job_logs, job, stop, poll_s)
        except (RuntimeError, OSError, Stopped) as error:
            log = f"the log of Ray job {job} could not be fetched: {str(error) or 'the ablation was stopped'}\n"
            print(log, end="", file=sys.stderr, flush=True)
        (run.directory / LOG).write_text(log, encoding="utf-8")
        if status == JobStatus.SUCCEEDED:
            return 0
        try:
            return _answer(client.get_job_info, job, stop, poll_s).driver_exit_code or 1
        except (RuntimeError, OSError, Stopped):
            return 1

    return launch


def _answer(ask: Callable, job: str, stop: threading.Event, poll_s: float):
    """``ask(job)``, of a job that runs for days: a dashboard that does not answer is asked again for ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(job)
        except (RuntimeError, OSError):
            if time.monotonic() > deadline:
                raise
        if stop.wait(poll_s):
            raise Stopped


def _stop_job(client, job: str) -> None:
    """Ray kills a job that does not end by itself. Waited for: the next ablation may write to the same directory."""
    try:
        client.stop_job(job)
        deadline = time.monotonic() + GRACE_S
        while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    except (RuntimeError, OSError) as error:  # of the cluster, or of the way to it
        print(f"Ray job {job} could not be stopped: {error}", file=sys.stderr, flush=True)
