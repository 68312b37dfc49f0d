"""Runs of a plan, each in a process of its own: one after another here, or as jobs of a Ray cluster."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

from qarl_openrlhf.ablation.plan import PlannedRun, PlanError
from qarl_openrlhf.ablation.status import FAILED, FINISHED, RUNNING, is_finished, write_status
from qarl_openrlhf.metrics.progress import follow

LOG = "train.log"
GRACE_S = 20  # from asking a run to end to killing it
Launch = Callable[[PlannedRun, list[str]], int]


def execute(runs: list[PlannedRun], launch: Launch, *, parallel: int = 1, keep_models: bool = False, done=lambda run: None) -> list[PlannedRun]:
    """Run what is not finished yet; returns the runs that failed. ``done`` is called after each run.

    A run that fails is noted in its status.json, with the end of its log, and the others go on. One that was stopped halfway
    resumes from its last checkpoint (``--ckpt.save_steps``), or begins anew.
    """
    waiting = [run for run in runs if not is_finished(run)]
    for run in runs:
        if run not in waiting:
            print(f"{run.identity.arm} seed {run.identity.seed}: finished before, {run.directory}", flush=True)
    failed = []

    def one(run: PlannedRun) -> None:
        position = f"[{waiting.index(run) + 1}/{len(waiting)}]"
        flags = [*run.flags, *(["--ckpt.load_enable"] if (run.directory / "checkpoints" / "_actor").is_dir() else [])]
        print(f"{position} {run.identity.arm} seed {run.identity.seed}: {run.directory / LOG}", flush=True)
        run.directory.mkdir(parents=True, exist_ok=True)
        write_status(run, RUNNING)
        started = time.monotonic()
        code = launch(run, flags)
        took = f"{time.monotonic() - started:.0f} s"
        if code == 0:
            if not keep_models:
                for folder in ("model", "checkpoints"):
                    shutil.rmtree(run.directory / folder, ignore_errors=True)
            write_status(run, FINISHED, returncode=0)
            print(f"{position} {run.identity.arm} seed {run.identity.seed}: finished in {took}", flush=True)
        else:
            reason = last_error(run.directory / LOG)
            write_status(run, FAILED, returncode=code, reason=f"exit status {code}: {reason}")
            failed.append(run)
            print(f"{position} {run.identity.arm} seed {run.identity.seed}: FAILED after {took}, exit status {code}: {reason}", flush=True)
        done(run)

    if parallel == 1:
        for run in waiting:
            one(run)
    else:
        with ThreadPoolExecutor(parallel) as pool:
            list(pool.map(one, waiting))
    return failed


def launch_here(run: PlannedRun, flags: list[str]) -> int:
    """train_qarl in a session of its own, output in ``train.log``, its steps shown here; returns the exit status."""
    prefix = f"  {run.identity.arm} seed {run.identity.seed}  "
    stop = threading.Event()
    watcher = threading.Thread(
        target=follow, args=(str(run.directory), stop, lambda line, flush: print(prefix + line, flush=flush)), daemon=True
    )
    with open(run.directory / LOG, "ab") as log:
        command = [*run.command[: -len(run.flags)], *flags]
        log.write(f"\n$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        watcher.start()
        try:
            return process.wait()
        finally:
            _end(process)
            stop.set()
            watcher.join(timeout=5)


def _end(process: subprocess.Popen) -> None:
    """Nothing to do for a run that ended; one whose ablation is interrupted is asked to, then made to."""
    if process.poll() is None:
        for sign in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, sign)
            try:
                process.wait(GRACE_S)
                return
            except subprocess.TimeoutExpired:
                continue


def ray_job_launcher(address: str, poll_s: float = 5.0) -> Launch:
    """A function that submits a run to the Ray cluster at ``address`` (its dashboard, http://HOST:8265) and waits for its end.

    The run directory must be on a file system that the cluster shares, and qarl_openrlhf be installed there.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlanError(f"--ray_address {address}: {error}") from None

    def launch(run: PlannedRun, flags: list[str]) -> int:
        # The cluster has its own Python.
        job = client.submit_job(entrypoint=shlex.join(["python", *run.command[1 : -len(run.flags)], *flags]))
        try:
            while not (status := client.get_job_status(job)).is_terminal():
                time.sleep(poll_s)
        except BaseException:
            client.stop_job(job)
            raise
        (run.directory / LOG).write_text(client.get_job_logs(job), encoding="utf-8")
        return 0 if status == JobStatus.SUCCEEDED else client.get_job_info(job).driver_exit_code or 1

    return launch


@contextmanager
def only_one_in(out: Path):
    """PlanError when another ablation is at work in ``out``, or a run that one left behind."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlanError(f"another ablation is at work in {out}: wait for it, or give another --out") from None
        yield


def last_error(log: Path, lines: int = 400) -> str:
    """The last line of a log that looks like an error, or else its last line."""
    if not log.is_file():
        return "no output"
    tail = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if line.strip()]
    joined = []
    for line in tail:  # "Last error:" of NCCL says what on the line after it
        if joined and joined[-1].endswith("error:"):
            joined[-1] = f"{joined[-1]} {line}"
        else:
            joined.append(line)
    errors = [
        line for line in joined if line.split(":")[0].endswith(("Error", "Exception")) or ("error:" in line and line[-1] != ":")
    ]
    return (errors or joined or ["no output"])[-1][:400]
