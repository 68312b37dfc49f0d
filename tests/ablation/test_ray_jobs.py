"""Runs as jobs of a real Ray cluster, one that this test starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qarl_openrlhf.ablation.execute import execute
from qarl_openrlhf.ablation.launch import LOG, ray_job_launcher
from qarl_openrlhf.ablation.plan import PlannedRun, PlanError
from qarl_openrlhf.ablation.status import is_finished, read_status
from qarl_openrlhf.report.discover import Identity


@pytest.fixture
def dashboard(tmp_path, monkeypatch):
    """Address of the dashboard of a Ray head with four logical CPUs; the head runs in the foreground and ends with the test."""
    bin_directory = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin_directory}:{os.environ['PATH']}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ports = []
    for _ in range(4):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            ports.append(str(sock.getsockname()[1]))
    words = [
        "--head", "--block", "--num-cpus=4", f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}",
        f"--dashboard-agent-listen-port={ports[3]}",  # its default is taken where another Ray runs, and jobs have no agent then
    ]  # fmt: skip
    with open(tmp_path / "head.log", "w") as log:
        head = subprocess.Popen(
            [bin_directory / "ray", "start", *words, "--include-dashboard=true", "--disable-usage-stats", f"--temp-dir=/tmp/qarl-jobs-{os.getpid()}"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    address = f"http://127.0.0.1:{ports[1]}"
    try:
        yield address, head
    finally:
        head.terminate()
        head.wait(60)


def launcher(address, head):
    import time

    for _ in range(60):
        assert head.poll() is None, "the Ray head ended"
        try:
            return ray_job_launcher(address, poll_s=0.5)
        except PlanError:
            time.sleep(2)
    raise AssertionError("the dashboard did not answer")


@pytest.mark.slow
def test_jobs_succeed_and_fail_with_their_logs(dashboard, tmp_path):
    launch = launcher(*dashboard)
    flags = {"good": ["--help"], "bad": ["--quant.scheme", "nonsense"]}
    runs = [PlannedRun(Identity(name, "w4a16", 0), tmp_path / name, words) for name, words in flags.items()]
    assert execute(runs, launch, parallel=2) == [runs[1]]
    assert is_finished(runs[0]) and "--quant.scheme" in (runs[0].directory / LOG).read_text()
    assert "nonsense" in read_status(runs[1].directory)["reason"]


def test_no_cluster_is_an_error_naming_the_address():
    with pytest.raises(PlanError, match="--ray_address http://127.0.0.1:9"):
        ray_job_launcher("http://127.0.0.1:9")
