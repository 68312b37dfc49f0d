"""A signal to the ablation ends its runs, real processes here that sleep, one after another and side by side."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from qarl_openrlhf.ablation import launch as launch_module
from qarl_openrlhf.ablation.launch import Stopped, launch_here, ray_job_launcher
from qarl_openrlhf.ablation.plan import PlannedRun
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


def test_nothing_is_started_when_all_is_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    stop = threading.Event()
    stop.set()
    for launch in (launch_here, ray_job_launcher("http://cluster")):
        with pytest.raises(Stopped):
            launch(asleep(tmp_path, "hears"), ["hears"], stop)
    assert not Client.last.jobs and not processes_with(str(tmp_path / "run"))
