"""An ablation that is told to stop takes its run with it, and the next call begins that run anew."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.tiny_models import save_tiny_model


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def processes_with(text: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if text.encode() in file.read() and int(pid) != os.getpid():
                    found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_terminated_ablation_leaves_no_process_and_an_unfinished_run(tmp_path):
    model = save_tiny_model(tmp_path / "model", "qwen2", hidden=128)
    out = tmp_path / "out"
    words = [
        "--arms", "tbpo", "--schemes", "bf16", "--out", str(out), "--device", "cpu", "--actor.model_name_or_path", model,
        "--data.prompt_dataset", "prompts.jsonl", "--reward.remote_url", "reward.py", "--vllm.num_engines", "1",
        "--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--algo.advantage.estimator", "group_norm",
        "--rollout.n_samples_per_prompt", "8",
    ]  # fmt: skip
    ablation = subprocess.Popen([sys.executable, "-m", "qarl_openrlhf.cli.ablate_objectives", *words], stdout=subprocess.PIPE, text=True)
    directory = out / "tbpo" / "bf16" / "seed0"
    try:
        wait_for(lambda: any(pid != ablation.pid for pid in processes_with(str(directory))))
        ablation.send_signal(signal.SIGTERM)
        ablation.communicate(timeout=60)
    finally:
        ablation.kill()
    assert ablation.returncode != 0
    assert wait_for(lambda: not processes_with(str(directory)), 20)
    assert json.loads((directory / "status.json").read_text())["state"] == "running"
