"""bench_step whole, on a CPU: the real trainer, DeepSpeed, vLLM and the push, on the shape "tiny"."""

import gc
import json
import weakref

import pytest

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
def test_a_learner_leaves_nothing_behind(tmp_path):
    """Depth after depth in one process: what one leaves on a card, the next one does not have."""
    workload = Workload(prompt=8, response=8, prompts=1, samples=2, update_samples=2)
    step_learner.one_rank_environment()
    flags = step_learner.recipe_flags(workload, tokens=32, samples=2, world=1)
    directory = sync.write_config(str(tmp_path), "tiny", 1)
    args = step_learner.resolve(directory, "w4a16", "cpu", flags, [])
    learner = step_learner.StepLearner(args, sync.config_of("tiny", 1), "cpu")
    figures = learner.measure(8, [8, 8, 8, 8], repeats=1, profile=True)
    assert figures["tokens"] == 64 and figures["runs"][0][OLD] > 0
    profile = {row["name"]: row for row in figures["profile"]}
    assert profile["aten::mm"]["calls"] > 10 and profile["aten::mm"]["ms"] > 0
    assert [row["ms"] for row in figures["profile"]] == sorted((row["ms"] for row in figures["profile"]), reverse=True)
    held = [weakref.ref(p) for p in learner.trainer.actor.network.parameters()]
    learner.close()
    gc.collect()
    assert not any(ref() is not None for ref in held)
