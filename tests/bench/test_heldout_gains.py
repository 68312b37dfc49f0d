"""Gains from one start a scheme, on runs written out by hand."""

import importlib.util
import json
from pathlib import Path


def write_run(directory: Path, scheme: str, seed: int, accuracy: dict[int, float]) -> None:
    directory.mkdir(parents=True)
    (directory / "status.json").write_text(json.dumps({"state": "finished", "objective": "tbpo", "scheme": scheme, "seed": seed}))
    rows = [{"step": step, "mismatch/abs_logp_mean": 0.5, "sync/changed_code_frac": 0.25} for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = [{"step": step, "eval_sums_pass1": value} for step, value in accuracy.items()]
    (directory / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluated))


def test_a_start_is_of_all_settings_and_seeds_that_ended_before_are_left_out(tmp_path, capsys):
    path = Path(__file__).parents[2] / "benchmarks" / "heldout_gains.py"
    spec = importlib.util.spec_from_file_location("heldout_gains", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    write_run(tmp_path / "a" / "seed0", "bf16", 0, {0: 0.2, 1: 0.9, 2: 0.6, 3: 0.8})
    write_run(tmp_path / "a" / "seed1", "bf16", 1, {0: 0.4, 2: 0.5, 3: 0.7})
    write_run(tmp_path / "b" / "seed0", "bf16", 0, {0: 0.2, 3: 0.9})
    write_run(tmp_path / "b" / "seed2", "w4a16", 2, {0: 0.1, 1: 0.3})
    module.main([str(tmp_path / "a"), str(tmp_path / "b"), "--steps", "2", "3"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a tbpo bf16: 2 seeds, start 0.300, steps 2 3 0.650 +- 0.071, gain +0.350, codes changed a publish 25.000%")
    assert second.startswith("b tbpo bf16: 1 seeds, start 0.300, steps 2 3 0.900, gain +0.600")
