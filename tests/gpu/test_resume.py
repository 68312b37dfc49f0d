"""A learner killed with -9 on a card: its run ends, leaves nothing, and resumed gives the metrics of a run never killed."""

import os
import shutil
import signal
import time
from pathlib import Path

from tests.e2e.conftest import two_steps, write_prompts
from tests.e2e.test_faults import Run
from tests.e2e.test_resume import check_same, newest
from tests.tiny_models import save_tiny_model

LIMIT_S = 200


def wait(run: Run) -> int:
    try:
        return run.process.wait(LIMIT_S)
    finally:
        print(run.text[-3000:])


def test_a_killed_learner_is_resumed(tmp_path):
    model, prompts = save_tiny_model(tmp_path / "model", "qwen3", hidden=256), write_prompts(tmp_path)
    flags = {
        name: two_steps(model, prompts, str(tmp_path / name))
        | {
            "device": "cuda",
            "train.colocate_all": True,
            "vllm.gpu_memory_utilization": 0.05,
            "vllm.engine_args": '{"kv_cache_memory_bytes": 268435456}',  # two runs on one card
            "vllm.enforce_eager": True,
            "quant.scheme": "w4a16",
            "objective.name": "tbpo",
            "sync.probe_tol": 0.5,
            "train.num_episodes": 4,  # 8 steps: it is over long after its second
            "ckpt.save_steps": 1,
            "ckpt.max_num": 2,
        }
        for name in ("undisturbed", "killed")
    }
    runs = [Run(wanted, tmp_path / f"{name}.txt") for name, wanted in flags.items()]
    try:
        killed = runs[1]
        killed.wait_for_steps(2, timeout=LIMIT_S)
        actor = Path(flags["killed"]["ckpt.path"], "_actor")
        until = time.monotonic() + 20
        while not newest(actor):
            assert time.monotonic() < until, "no checkpoint"
            time.sleep(0.02)
        killed.named("ray::QarlPolicyActor").send_signal(signal.SIGKILL)
        assert killed.process.wait(120) != 0
        assert killed.metrics.read_text().count("\n") < 8, "the run was over before its learner was killed"
        killed.assert_gone()
        saved = newest(actor)
        runs.append(Run(flags["killed"] | {"ckpt.load_enable": True}, tmp_path / "resumed.txt"))
        assert wait(runs[0]) == 0
        assert wait(runs[2]) == 0
        check_same(flags["undisturbed"], flags["killed"], since=saved)
        assert not [name for name in os.listdir(actor) if name.endswith(".partial")]
    finally:
        for run in runs:
            run.end()
        for wanted in flags.values():
            shutil.rmtree(wanted["ckpt.path"], ignore_errors=True)
