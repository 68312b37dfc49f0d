"""A signal to the ablation ends its runs, real processes here that sleep, one after another and side by side."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from qarl_openrlhf.ablation import launch as launch_module
from qarl_openrlhf.ablation.execute import only_one_in
from qarl_openrlhf.ablation.launch import LOG, Stopped, launch_here, ray_job_launcher
from qarl_openrlhf.ablation.plan import PlannedRun, PlanError
from qarl_openrlhf.ablation.status import read_status
from qarl_openrlhf.report.discover import Identity
from tests.ablation.test_interrupt import processes_with, wait_for

# The command line itself, with runs that are a shell and its child.
ABLATION = """
import sys
from pathlib import Path
from qarl_openrlhf.ablation.plan import Plan, PlannedRun
from qarl_openrlhf.cli import ablate_objectives
from qarl_openrlhf.report.discover import Identity

out, parallel, child = sys.argv[1:]
PlannedRun.command = property(lambda run: ["sh", "-c", child, *run.flags])
runs = [PlannedRun(Identity(name, "w4a16", 0), Path(out, name), [f"{out}/{name}"]) for name in "abc"]
ablate_objectives._plan = lambda args, shared: Plan(runs)
ablate_objectives.ray_job_launcher = lambda address: ablate_objectives.launch_here
ablate_objectives.main(["--out", out, "--parallel", parallel, *(["--ray_address", "http://cluster"] if parallel != "1" else [])])
"""
CHILD = """sh -c 'sleep 300; exit 1' "$0-grandchild"; exit 1"""


@pytest.mark.parametrize(
    "parallel, sign, word",
    [
        (2, signal.SIGTERM, "terminated"),
        (1, signal.SIGINT, "interrupted"),
        pytest.param(1, signal.SIGTERM, "terminated", marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_runs_at_work_and_begins_no_other(tmp_path, parallel, sign, word):
    ablation = subprocess.Popen(
        [sys.executable, "-c", ABLATION, str(tmp_path), str(parallel), CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    at_work = "abc"[:parallel]
    try:
        wait_for(lambda: all(processes_with(f"{tmp_path}/{name}-grandchild") for name in at_work))
        started = time.monotonic()
        ablation.send_signal(sign)
        _, said = ablation.communicate(timeout=60)
    finally:
        ablation.kill()
    assert time.monotonic() - started < 5
    assert said == f"ablate_objectives: {word} ({sign.name}): the same command goes on with the runs that are not finished\n"
    assert ablation.returncode == 128 + sign
    assert not any(processes_with(f"{tmp_path}/{name}") for name in "abc")
    assert [(tmp_path / name / "status.json").exists() for name in "abc"] == [name in at_work for name in "abc"]
    assert {read_status(tmp_path / name)["state"] for name in at_work} == {"running"}


def in_a_thread(launch, run):
    """(the event that stops the run, the thread, what it came to)"""
    stop, came = threading.Event(), []

    def call():
        try:
            came.append(launch(run, run.flags, stop))
        except Stopped as error:
            came.append(error)

    run.directory.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=call)
    thread.start()
    return stop, thread, came


class Asleep(PlannedRun):
    """A shell whose command line holds the run's directory; deaf to SIGTERM if the flag says so."""

    @property
    def command(self):
        return ["sh", "-c", """[ "$1" = deaf ] && trap '' TERM; sleep 300; sleep 300; exit 1""", str(self.directory), *self.flags]


def asleep(tmp_path, how):
    return Asleep(Identity("tbpo", "w4a16", 0), tmp_path / "run", [how])


def enters(directory) -> bool:
    with suppress(PlanError), only_one_in(directory):
        return True
    return False


def test_what_a_killed_ablation_left_keeps_its_directory_until_it_ends(tmp_path):
    """The run itself and no longer: a daemon that it started stays behind, as Ray's do for a while."""
    run = """import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1] + "-daemon"], start_new_session=True)
time.sleep(300)"""
    child = f"exec {sys.executable} -c '{run}' $0"
    ablation = subprocess.Popen([sys.executable, "-c", ABLATION, str(tmp_path), "1", child], stdout=subprocess.PIPE)
    left = []
    try:
        wait_for(lambda: processes_with(f"{tmp_path}/a-daemon"), 60)
        ablation.kill()
        ablation.wait(20)
        left = [pid for pid in processes_with(f"{tmp_path}/a") if pid not in processes_with(f"{tmp_path}/a-daemon")]
        with pytest.raises(PlanError, match=f"a run that a killed one left, is at work in {tmp_path}: wait for its end"):
            with only_one_in(tmp_path):
                pass
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: enters(tmp_path), 20)  # a killed process shows no command line for a moment before its files are closed
        assert processes_with(f"{tmp_path}/a-daemon")
    finally:
        ablation.kill()
        for pid in {*left, *processes_with(f"{tmp_path}/a")}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["deaf", "hears"])
def test_a_run_that_does_not_end_when_asked_to_is_killed(tmp_path, monkeypatch, how):
    monkeypatch.setattr(launch_module, "GRACE_S", 0.5)
    run = asleep(tmp_path, how)
    stop, thread, came = in_a_thread(launch_here, run)
    wait_for(lambda: processes_with(str(run.directory)), 20)
    time.sleep(0.3)  # for the trap
    stop.set()
    thread.join(10)
    assert not thread.is_alive() and isinstance(came[0], Stopped) and not processes_with(str(run.directory))


class Status(str):
    def is_terminal(self):
        return self != "RUNNING"


class Client:
    """Ray's job client, with jobs that are processes of this machine."""

    def __init__(self, address):
        self.jobs = {}
        Client.last = self

    def submit_job(self, entrypoint):
        self.jobs["job"] = subprocess.Popen(["sh", "-c", "sleep 300"], start_new_session=True)
        return "job"

    def get_job_status(self, job):
        return Status("RUNNING" if self.jobs[job].poll() is None else "STOPPED")

    def stop_job(self, job):
        os.killpg(self.jobs[job].pid, signal.SIGTERM)
        if self.lost:
            raise RuntimeError("Request failed with status code 500")

    lost = False


@pytest.mark.parametrize("lost", [False, True])
def test_a_ray_job_is_stopped_and_waited_for(tmp_path, monkeypatch, capsys, lost):
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    monkeypatch.setattr(Client, "lost", lost)
    stop, thread, came = in_a_thread(ray_job_launcher("http://cluster", poll_s=60), asleep(tmp_path, "hears"))
    process = wait_for(lambda: Client.last.jobs.get("job"), 20)
    stop.set()
    thread.join(10)
    assert not thread.is_alive() and isinstance(came[0], Stopped) and process.wait(5) == -signal.SIGTERM
    assert capsys.readouterr().err == ("Ray job job could not be stopped: Request failed with status code 500\n" if lost else "")


def test_a_dashboard_that_does_not_answer_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    lost = [ConnectionError("restarting"), RuntimeError("Request failed with status code 500")]
    ask = Client.get_job_status
    monkeypatch.setattr(Client, "get_job_status", lambda self, job: (_ for _ in ()).throw(lost.pop()) if lost else ask(self, job))
    stop, thread, came = in_a_thread(ray_job_launcher("http://cluster", poll_s=0.1), asleep(tmp_path, "hears"))
    process = wait_for(lambda: Client.last.jobs.get("job"), 20)
    wait_for(lambda: not lost, 20)
    assert thread.is_alive() and process.poll() is None
    stop.set()
    thread.join(20)
    assert not thread.is_alive() and isinstance(came[0], Stopped) and process.wait(5) == -signal.SIGTERM


class Ended(Client):
    """A job that has ended, and a dashboard that does not answer to one of the calls, for so many times."""

    status, silent, times = "SUCCEEDED", "", 0

    def submit_job(self, entrypoint):
        return "job"

    def answer(self, call, said):
        if call == self.silent and self.times:
            Ended.times -= 1
            raise ConnectionError("restarting")
        return said

    def get_job_status(self, job):
        return self.answer("status", Status(self.status))

    def get_job_logs(self, job):
        return self.answer("logs", "step 1\n")

    def stop_job(self, job):
        pass

    def get_job_info(self, job):
        return self.answer("info", SimpleNamespace(driver_exit_code=7))


@pytest.mark.parametrize("status, code", [("SUCCEEDED", 0), ("FAILED", 7)])
@pytest.mark.parametrize("silent", ["status", "logs", "info"])
@pytest.mark.parametrize("patience", [30, 0])
def test_a_job_that_ended_has_its_own_end_whatever_the_dashboard_says(tmp_path, monkeypatch, capsys, status, code, silent, patience):
    """A dashboard that answers again in time makes no difference; one that does not costs the log, or the exact exit status."""
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Ended)
    monkeypatch.setattr(launch_module, "PATIENCE_S", patience)
    for name, value in {"status": status, "silent": silent, "times": 2 if patience else 1000}.items():
        monkeypatch.setattr(Ended, name, value)
    run = asleep(tmp_path, "hears")
    run.directory.mkdir()
    launch = ray_job_launcher("http://cluster", poll_s=0.01)
    if silent == "status" and not patience:
        with pytest.raises(ConnectionError):  # nobody knows how it ended
            launch(run, run.flags, threading.Event())
        return
    assert launch(run, run.flags, threading.Event()) == (1 if (silent, patience, status) == ("info", 0, "FAILED") else code)
    lost = silent == "logs" and not patience
    note = "the log of Ray job job could not be fetched: restarting\n"
    assert (run.directory / LOG).read_text() == (note if lost else "step 1\n")
    assert capsys.readouterr().err == (note if lost else "")


def test_nothing_is_started_when_all_is_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    stop = threading.Event()
    stop.set()
    for launch in (launch_here, ray_job_launcher("http://cluster")):
        with pytest.raises(Stopped):
            launch(asleep(tmp_path, "hears"), ["hears"], stop)
    assert not Client.last.jobs and not processes_with(str(tmp_path / "run"))
