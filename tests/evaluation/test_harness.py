"""lm-evaluation-harness over our engines: its real tasks, on made copies of their data sets."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.evaluation import harness
from qarl_openrlhf.patches import vllm_cpu as patch
from tests.evaluation.hub_copies import SUBJECTS, write_copies
from tests.overlay import ROOT, with_packages
from tests.tiny_models import save_tiny_model


def test_names_and_directories(tmp_path, monkeypatch):
    assert [harness.name_of(a) for a in ("arc-c", f"mmlu-pro={tmp_path}", "math500", "arc-c.jsonl")] == [
        "arc-c",
        "mmlu-pro",
        None,
        None,
    ]
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    harness.require(["arc-c", f"mmlu-pro={tmp_path}"])
    with pytest.raises(DataError, match="hf download --repo-type dataset Idavidrein/gpqa"):
        harness.require(["gpqa-diamond=/no/such/directory"])


def test_vllm_is_found_under_its_other_name():
    assert patch.version("vllm").endswith("+cpu") or patch.version("vllm") == patch.metadata.version("vllm")
    with pytest.raises(patch.metadata.PackageNotFoundError):
        patch.version("no-such-package")


def test_the_command_that_serves_is_one_that_starts(monkeypatch):
    """tests/cli/test_serve.py runs it."""
    installed = {"vllm-cpu": "0.29.0"}

    def version(name):
        if name not in installed:
            raise patch.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(patch, "_version", version)
    assert patch.serve_command("runs/w4a16") == "python -m qarl_openrlhf.patches.vllm_cpu serve runs/w4a16"
    installed["vllm"] = "0.26.0"
    assert patch.serve_command("runs/w4a16") == "vllm serve runs/w4a16"


def test_served_with_memory_that_is_free():
    assert patch.with_memory(["serve", "d"]) == ["serve", "d", "--gpu-memory-utilization", "0.3"]
    for argv in (["serve", "d", "--gpu_memory_utilization", "0.5"], ["serve", "--gpu-memory-utilization=0.5", "d"], ["bench", "latency"], []):
        assert patch.with_memory(argv) == argv


@pytest.mark.slow
def test_data_is_looked_for_before_an_engine_starts(tmp_path, tmp_path_factory):
    environment = with_packages("eval", "lm_eval", tmp_path_factory.getbasetemp() / "lm_eval")
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    model = save_tiny_model(tmp_path / "model", "qwen3", hidden=128)
    (tmp_path / "empty").mkdir()
    for task, message in (("arc-c", "--tasks arc-c: allenai/ai2_arc is not in the cache"), ("arc-c=empty", "empty cannot be loaded")):
        command = [sys.executable, "-m", "qarl_openrlhf.cli.evaluate", model, "--out", "out", "--tasks", task]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and message in last and last.endswith("write --tasks arc-c=DIR"), done.stderr[-2000:]
        assert "safetensors" not in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bf16", "w4a16:g64"])
def test_the_three_tasks(tmp_path, tmp_path_factory, scheme):
    environment = with_packages("eval", "lm_eval", tmp_path_factory.getbasetemp() / "lm_eval") | {"HF_HUB_OFFLINE": "1"}
    model = save_tiny_model(tmp_path / "model", "qwen3", hidden=128)
    config = Path(model) / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096})
    )  # 25 examples, 2048 tokens
    out = tmp_path / "out"
    tasks = [f"{name}={directory}" for name, directory in write_copies(tmp_path / "hub").items()]
    command = [sys.executable, "-m", "qarl_openrlhf.cli.evaluate", model, "--out", str(out), "--tasks", *tasks]
    command += ["--scheme", scheme, "--limit", "1"]  # 4096 positions: less than --max_tokens, which is not theirs
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    scores = json.loads((out / "summary.json").read_text())["tasks"]
    assert {name: (each["items"], each["k"]) for name, each in scores.items()} == {
        "arc-c": (1, 1),
        "gpqa-diamond": (1, 1),
        "mmlu-pro": (14, 1),
    }
    assert (
        all(0 <= each["avg"] <= 1 for each in scores.values())
        and "| arc-c | gpqa-diamond | mmlu-pro | average |" in done.stdout
    )
    (arc,) = [json.loads(line) for line in (out / "arc-c.jsonl").read_text().splitlines()]
    assert arc["doc"]["question"] == "What is 30 plus 1?" and len(arc["resps"]) == 4  # a log-prob of each choice
    mmlu = [json.loads(line) for line in (out / "mmlu-pro.jsonl").read_text().splitlines()]
    assert [row["task"] for row in mmlu] == [f"mmlu_pro_{subject}" for subject in SUBJECTS]
    assert json.loads((out / "settings.json").read_text())["scheme"] == scheme


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="it is installed here")
def test_lm_eval_is_asked_for(tmp_path):
    with pytest.raises(DataError, match="pip install --no-deps -r requirements/eval.txt"):
        harness.require(["arc-c"])
    assert (ROOT / "requirements/eval.txt").is_file()
