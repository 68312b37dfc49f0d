"""The whole system on tiny random models: Ray, OpenRLHF's loop, DeepSpeed, a real vLLM engine, packed pushes.

Six runs of two steps, four of them in the long matrix. With three arms and three ZeRO stages a full pairwise cover needs nine; these six cover every pair except
(bf16, 2), (rollout, 1) and (qarl with w8a8, 1).
"""

import glob
import math
import os

import pytest

from qarl_openrlhf import runtime
from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.report import load_run

from .conftest import argv

RUNS = {
    "llama-w4a16-tbpo-zero1-apart": dict(family="llama", scheme="w4a16:g32", objective="tbpo", zero=1),
    "qwen2-w8a8-grpo-zero2-colocated": dict(  # with a reference model
        family="qwen2", scheme="w8a8", objective="grpo_tis", zero=2, colocated=True, kl=True
    ),
    "qwen3-w4a16-tbpo-zero3-colocated": dict(family="qwen3", scheme="w4a16:g32", objective="tbpo", zero=3, colocated=True, tied=True),
    "llama-w8a8-rollout-tbpo-zero2-apart": dict(  # packed, without flash-attn
        family="llama", scheme="w8a8:rollout", objective="tbpo", zero=2, packed=True
    ),
    "qwen2-w4a16-rollout-grpo-zero3-colocated": dict(
        family="qwen2", scheme="w4a16:g32:rollout", objective="grpo_tis", zero=3, colocated=True
    ),
    "qwen3-bf16-openrlhf-zero1-apart": dict(family="qwen3", scheme="bf16", objective=None, zero=1),
}


# BF16, apart, goes through tests/e2e/test_ablation.py, and in the long matrix a quantized rollout alone.
SHORT = ("qwen2-w8a8-grpo-zero2-colocated", "qwen3-w4a16-tbpo-zero3-colocated")
LOGGED = SHORT[0]  # also evaluates, and writes to wandb (offline) and tensorboard


@pytest.fixture(scope="module", autouse=True)
def ray_head(tmp_path_factory):
    import ray

    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(tmp_path_factory.mktemp("wandb")))
    environment = runtime.set_environment("cpu")
    runtime.start_ray("cpu", runtime.ResourcePlan({"actor": 4}), environment, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in RUNS])
def test_two_steps(name, tiny_model, flags, prompts, tmp_path, capsys):
    run = RUNS[name]
    model = tiny_model(run["family"], hidden=128, tied=run.get("tied", False))
    wanted = flags(model, name) | {
        "quant.scheme": run["scheme"],
        "ds.zero_stage": run["zero"],
        "ds.packing_samples": run.get("packed", False),
        "train.colocate_all": run.get("colocated", False),
        "actor.gradient_checkpointing_enable": run["zero"] == 3,
        "sync.verify": "readback",
        "sync.probe_tol": 0.1,
    }
    if run["objective"]:
        wanted["objective.name"] = run["objective"]
    if run.get("kl"):
        wanted |= {"algo.kl.init_coef": 0.01, "algo.kl.use_loss": True, "algo.kl.estimator": "k3"}
    if name == LOGGED:
        wanted |= {"logger.wandb.key": "0" * 40, "logger.wandb.run_name": "tiny", "logger.tensorboard_dir": str(tmp_path / "tb")}
        wanted |= {"eval.dataset": prompts, "eval.steps": 1, "eval.n_samples_per_prompt": 2, "ckpt.best_metric_key": "none"}
    train_qarl.main(argv(wanted))

    loaded = load_run(wanted["ckpt.output_dir"])
    rows = loaded.rows
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["sync/checksum_ok"] == 1 and row["sync/bytes"] > 0
        assert row["sync/probe_abs_logp"] < 0.1
        assert row["rollout/tok_per_s"] > 0 and row["timing/step_total"] > 0
        assert math.isfinite(row["mismatch/abs_logp_mean"])
        assert row.get("only_right", 1.0) == 1.0  # logged for right answers alone
        if run["objective"]:
            # r is exactly 1 before the first update: every response is in band
            assert row["objective/in_band_frac_by_update/0"] == 1.0
    quantized = run["scheme"] != "bf16"
    if run.get("kl"):
        # the reference is BF16: the quantized policy is away from it before any update
        assert rows[0]["kl"] > 1e-4
    assert (rows[-1]["sync/changed_code_frac"] > 0) == quantized
    assert ("  changed " in capsys.readouterr().out) == quantized  # of the lines that it printed
    if not run["scheme"].endswith("rollout"):
        assert rows[-1]["mismatch/abs_logp_mean"] < 0.05
    export = os.path.join(wanted["ckpt.output_dir"], "quantized-" + run["scheme"].removesuffix(":rollout").replace(":", "-"))
    assert os.path.exists(os.path.join(export, "config.json")) == quantized
    for plot in ("reward.png", "mismatch.png", "step_time.png"):
        assert os.path.getsize(os.path.join(wanted["ckpt.output_dir"], plot)) > 1000
    if name == LOGGED:
        check_loggers(tmp_path / "tb" / "tiny", rows[-1]["mismatch/abs_logp_mean"])
        assert [row["step"] for row in loaded.evaluations] == [0, 1, 2]  # 0: the start policy
        assert all(0 <= row["eval_default_pass1"] <= row["eval_default_pass2"] for row in loaded.evaluations)
        assert os.path.getsize(os.path.join(wanted["ckpt.output_dir"], "heldout.png")) > 1000


def test_workers_have_the_priority_of_the_run_and_not_rays_nice_15():
    import ray

    assert ray.get(ray.remote(num_cpus=1)(lambda: os.nice(0)).remote(), timeout=100) == os.nice(0)


def test_an_occupied_cluster_ends_in_an_error_that_names_the_resource():
    plan = runtime.ResourcePlan({"actor": 4, "engines": 1})
    with pytest.raises(runtime.ResourceError, match=r"GPU: 5 needed, 4 in the cluster"):
        runtime.start_ray("cpu", plan, {}, log_to_driver=False, timeout_s=60)
    runtime.placement_group([{"GPU": 1, "CPU": 1}] * 2)
    try:
        with pytest.raises(runtime.ResourceError, match=r"GPU: 3 needed, 4 in the cluster, 2 free"):
            runtime.start_ray("cpu", runtime.ResourcePlan({"actor": 3}), {}, log_to_driver=False, timeout_s=2)
        with pytest.raises(runtime.ResourceError, match=r"GPU: 3 needed, 2 free"):
            runtime.placement_group([{"GPU": 1}] * 3, timeout_s=2)
    finally:
        runtime.release_placement_groups()
    runtime.start_ray("cpu", runtime.ResourcePlan({"actor": 4}), {}, log_to_driver=False, timeout_s=30)


def check_loggers(tensorboard, mismatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tensorboard))
    events.Reload()
    values = events.Scalars("train/mismatch/abs_logp_mean")
    assert [event.step for event in values] == [1, 2] and values[-1].value == pytest.approx(mismatch, rel=1e-5)
    runs = glob.glob(os.path.join(os.environ["WANDB_DIR"], "wandb", "offline-run-*", "run-*.wandb"))
    assert len(runs) == 1 and os.path.getsize(runs[0]) > 1000
