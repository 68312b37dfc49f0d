"""scripts/slurm.sbatch and ray_submit.sh: what they refuse; and, in the slow set, a whole allocation of two nodes and a job, with real
Ray.

Slurm itself is not there: `srun -w HOST COMMAND` is a script that runs COMMAND here, and `scontrol` one that lists two hosts. Both
raylets of the cluster are then on this machine.
"""

import os
import random
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ablation.test_ray_jobs import dashboard, launcher  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "scripts" / "slurm.sbatch"
MODEL = Path(__file__).parent / "configs" / "qwen3-30b-a3b"

SRUN = """#!/usr/bin/env bash
echo "$@" >> "$SRUN_LOG"
while [[ $1 == -* ]]; do
    case $1 in
        --nodes | --ntasks | -w) shift 2 ;;
        --overlap) shift ;;
        *) echo "srun: unknown option $1" >&2; exit 1 ;;
    esac
done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' first second
"""


def run(tmp_path, *words: str, venv: Path, nodes: int = 2, job: int = 7, **env: str) -> subprocess.Popen:
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("QARL_", "RAY_", "SLURM_")) and k != "ARM"}
    clean |= {"PATH": f"{tools}:{os.environ['PATH']}", "SRUN_LOG": str(tmp_path / "srun.log"), "QARL_VENV": str(venv)}
    clean |= {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": str(job),
    }
    return subprocess.Popen(
        ["bash", str(SBATCH), *words],
        env=clean | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_wrong_recipes_and_places_are_refused(tmp_path):
    for words in ([], ["train_nothing.sh"]):
        stopped = run(tmp_path, *words, venv=tmp_path)
        assert "usage: sbatch" in stopped.communicate()[1] and stopped.returncode == 2
    stopped = run(tmp_path, "train_qwen3_8b.sh", venv=tmp_path / "none")
    assert "has no Ray: run scripts/setup_env.sh --cuda" in stopped.communicate()[1] and stopped.returncode == 1
    assert not (tmp_path / "srun.log").exists()


def is_free(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_two_nodes_join_and_the_recipe_runs_on_the_first(tmp_path):
    port = next(port for port in random.sample(range(20000, 30000), 100) if is_free(port))
    venv = Path(sys.executable).parents[1]
    flags = ["--actor.model_name_or_path", str(MODEL), "--dry_run", "--dry_run_gpu_gb", "80"]
    job = run(
        tmp_path, "train_qwen3_30b_a3b.sh", *flags, venv=venv, job=port - 20000, ARM="rollout", QARL_GPUS_PER_NODE="8",
        RAY_raylet_start_wait_time_s="180",
    )  # fmt: skip
    try:
        job.wait(500)
    finally:  # in an allocation, Slurm ends the steps in which `ray start --block` runs
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("SRUN_LOG") == str(tmp_path / "srun.log"):
                process.kill()
    output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors[-3000:]
    steps = [shlex.split(line) for line in (tmp_path / "srun.log").read_text().splitlines()]
    hosts = [step[step.index("-w") + 1] for step in steps]
    commands = [" ".join(step[step.index("-w") + 2 :]) for step in steps]
    assert sorted(hosts) == ["first"] * 4 + ["second"]
    assert sum("--head --node-ip-address" in c and f"--port {port} --num-gpus 8" in c for c in commands) == 1
    assert sum(f":{port} --num-gpus 8" in c and "--address" in c for c in commands) == 1
    assert commands[-1].startswith(f"--overlap bash {ROOT}/scripts/train_qwen3_30b_a3b.sh --actor.model_name_or_path")
    assert (
        "16" in output and "--quant.scheme" in output and "w4a16:rollout" in output
    )  # the dry run of the recipe, for 2 x 8 GPUs


@pytest.mark.parametrize("address", ["http://localhost:1", "nonsense://host"])
def test_ray_submit_to_no_cluster_is_one_line(address):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("QARL_", "RAY_"))} | {"QARL_VENV": str(Path(sys.executable).parents[1])}
    command = ["bash", str(ROOT / "scripts" / "ray_submit.sh"), address, "train_qwen3_8b.sh", "--dry_run"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ray_submit: {address}: ") and line.endswith("; give the dashboard of a running Ray cluster, http://HOST:8265")


@pytest.mark.slow
def test_ray_submit_runs_a_recipe(dashboard):  # noqa: F811
    launcher(*dashboard)  # waits until the dashboard answers
    flags = ["--actor.model_name_or_path", str(MODEL), "--dry_run", "--dry_run_gpu_gb", "80"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("QARL_", "RAY_")) and k != "ARM"}
    clean |= {"ARM": "rollout", "QARL_NODES": "2", "QARL_VENV": str(Path(sys.executable).parents[1])}
    command = ["bash", str(ROOT / "scripts" / "ray_submit.sh"), dashboard[0], "train_qwen3_30b_a3b.sh", *flags]
    until = time.monotonic() + 120
    while True:
        done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
        # Ray's own answer as long as the agent of a node that has just started is not there yet.
        if "No available agent" not in done.stderr or time.monotonic() > until:
            break
        time.sleep(2)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "w4a16:rollout" in done.stdout and "succeeded" in done.stdout
