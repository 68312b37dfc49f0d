"""bench_step whole, on a CPU: the real trainer, DeepSpeed, vLLM and the push, on the shape "tiny"."""

import gc
import json
import weakref

import pytest
import torch

from qarl_openrlhf.bench import step_learner, sync
from qarl_openrlhf.bench.step_clock import OLD, OPTIMIZER, QUANTIZE, TRAIN
from qarl_openrlhf.bench.step_workload import Workload
from qarl_openrlhf.cli import bench_step

WORDS = (
    "--device cpu --shape tiny --schemes bf16 w4a16 w4a16:rollout --layers 1,2,4 --prompt 8 --response 12 --prompts 2 "
    "--samples 2 --update_samples 2 --tokens 40 --repeats 1 --pushes 1 --lengths mixed --actor.logprob_chunk 16"
).split()


@pytest.mark.slow
def test_a_step_is_measured_whole_and_a_second_run_has_nothing_to_do(tmp_path, capsys):
    assert bench_step.main([*WORDS, "--out", str(tmp_path)]) == 0
    path = tmp_path / "step_tiny_cpu.json"
    record = json.loads(path.read_text())
    assert record["failures"] == {} and len(record["pieces"]) == 2 * (3 + 1 + 1)
    for scheme in ("bf16", "w4a16", "w4a16:rollout"):
        step = record["summary"]["mixed"]["steps"][scheme]
        assert all(value is not None for value in step.values())
        assert step["rollout"] > 0 and step[TRAIN] > 0 and step[OPTIMIZER] > 0 and step["push"] > 0
        assert (step[QUANTIZE] > 0) == (scheme == "w4a16")
    piece = record["pieces"]["learner/w4a16/mixed/4"]
    assert piece["in_band_before_update"] == 1.0 and piece["micro_batches"] >= 2
    assert record["pieces"]["push/w4a16/4"]["checksum_ok"] == 1.0
    assert record["pieces"]["push/w4a16/4"]["bytes"] < record["pieces"]["push/bf16/4"]["bytes"]
    fits = record["summary"]["mixed"]["lines"]["w4a16"]
    assert {"fixed", "per_layer", "residual", "at_full_depth"} == set(fits[TRAIN])
    assert "faster than bf16" in record["summary"]["mixed"] and "w4a16 takes" in capsys.readouterr().out

    assert bench_step.main([*WORDS, "--out", str(tmp_path)]) == 0
    assert json.loads(path.read_text())["pieces"] == record["pieces"]


@pytest.mark.slow
@pytest.mark.parametrize("stage, shape", [(2, "tiny"), (3, "tiny-moe")])
def test_a_learner_leaves_nothing_behind(tmp_path, monkeypatch, stage, shape):
    """Depth after depth in one process: what one leaves on a card, the next one does not have, and has weights of its own."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    torch.use_deterministic_algorithms(True, warn_only=True)
    workload = Workload(prompt=8, response=8, prompts=1, samples=2, update_samples=2)
    step_learner.one_rank_environment()
    flags = step_learner.recipe_flags(workload, tokens=32, samples=2, world=1)
    directory = sync.write_config(str(tmp_path), shape, 1)
    args = step_learner.resolve(directory, "w4a16", "cpu", flags, ["--ds.zero_stage", str(stage)])
    learner = step_learner.StepLearner(args, sync.config_of(shape, 1), "cpu")
    torch.use_deterministic_algorithms(False)
    for name, parameter in learner.trainer.actor.network.named_parameters():
        weights = getattr(parameter, "ds_tensor", parameter)  # one rank: its shard is all of it
        assert weights.isfinite().all() and (weights.dim() == 0 or "norm" in name or 0.01 < weights.float().std() < 0.05), name
    figures = learner.measure(8, [8, 8, 8, 8], repeats=1, profile=True)
    assert figures["tokens"] == 64 and figures["runs"][0][OLD] > 0
    profile = {row["name"]: row for row in figures["profile"]}
    assert profile["aten::mm"]["calls"] > 10 and profile["aten::mm"]["ms"] > 0
    assert [row["ms"] for row in figures["profile"]] == sorted((row["ms"] for row in figures["profile"]), reverse=True)
    kept = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.numel() >= 2**17]
    assert len(kept) >= 8
    held = [weakref.ref(tensor) for tensor in kept]
    del kept, parameter, weights
    learner.close()
    gc.collect()
    assert not [ref().shape for ref in held if ref() is not None and ref().numel()]
