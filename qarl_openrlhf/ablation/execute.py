"""Runs of a plan, each in a process of its own: one after another here, or as jobs of a Ray cluster."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from qarl_openrlhf.ablation.launch import LOG, Launch, Stopped
from qarl_openrlhf.ablation.plan import PlannedRun, PlanError
from qarl_openrlhf.ablation.status import FAILED, FINISHED, RUNNING, is_finished, read_status, write_status


def execute(runs: list[PlannedRun], launch: Launch, *, parallel: int = 1, keep_models: bool = False, done=lambda run: None) -> list[PlannedRun]:
    """Run what is not finished yet; returns the runs that failed. ``done`` is called after each run, never twice at a time.

    A run that fails is noted in its status.json, with the end of its log, and the others go on. An exception, such as a signal's
    in the main thread, ends those at work, too. A run that was stopped halfway resumes from its last checkpoint
    (``--ckpt.save_steps``), or begins anew.
    """
    waiting = [run for run in runs if not is_finished(run)]
    for run in runs:
        if run not in waiting:
            print(f"{run.identity.arm} seed {run.identity.seed}: finished before, {run.directory}", flush=True)
            if (read_status(run.directory) or {}).get("models_kept") is False:
                remove_models(run)  # what a call that ended in the middle of it left
    failed = []
    stop, one_at_a_time = threading.Event(), threading.Lock()

    def one(run: PlannedRun) -> None:
        position = f"[{waiting.index(run) + 1}/{len(waiting)}]"
        flags = [*run.flags, *(["--ckpt.load_enable"] if (run.directory / "checkpoints" / "_actor").is_dir() else [])]
        print(f"{position} {run.identity.arm} seed {run.identity.seed}: {run.directory / LOG}", flush=True)
        run.directory.mkdir(parents=True, exist_ok=True)
        write_status(run, RUNNING)
        started = time.monotonic()
        code = launch(run, flags, stop)
        took = f"{time.monotonic() - started:.0f} s"
        if code == 0:
            write_status(run, FINISHED, returncode=0, models_kept=keep_models)
            if not keep_models:  # not before the run counts as finished: it could not resume from half a checkpoint
                remove_models(run)
            print(f"{position} {run.identity.arm} seed {run.identity.seed}: finished in {took}", flush=True)
        else:
            reason = last_error(run.directory / LOG)
            write_status(run, FAILED, returncode=code, reason=f"exit status {code}: {reason}")
            failed.append(run)
            print(f"{position} {run.identity.arm} seed {run.identity.seed}: FAILED after {took}, exit status {code}: {reason}", flush=True)
        with one_at_a_time:
            done(run)

    def one_unless_stopped(run: PlannedRun) -> None:
        try:
            if not stop.is_set():
                one(run)
        except Stopped:
            pass  # the reason is raised where it arose
        except BaseException:
            stop.set()  # here, before this thread takes the next run
            raise

    pool = ThreadPoolExecutor(parallel)
    try:
        for ended in as_completed([pool.submit(one_unless_stopped, run) for run in waiting]):
            ended.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def remove_models(run: PlannedRun) -> None:
    for folder in ("model", "checkpoints"):
        shutil.rmtree(run.directory / folder, ignore_errors=True)


@contextmanager
def only_one_in(out: Path) -> Iterator[int]:
    """PlanError when another ablation is at work in ``out``, or a run of this machine that one left behind when it was killed.

    Yields the lock's file descriptor: the system gives the lock back when the last process that has it ends, so runs that are given
    it hold it, too. A job of a Ray cluster cannot.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlanError(f"another ablation, or a run that a killed one left, is at work in {out}: wait for its end, or give another --out") from None
        yield file.fileno()


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
