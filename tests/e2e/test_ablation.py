"""Two steps of an arm through the command: every file an ablation leaves, then nothing to do the second time. In the long matrix a quantized rollout alone beside it."""

import csv
import json
import math

import pytest

from qarl_openrlhf.cli import ablate_objectives
from qarl_openrlhf.cli import report as report_cli
from qarl_openrlhf.report import load_run
from qarl_openrlhf.report.histograms import load_histograms

from .conftest import argv


@pytest.mark.parametrize("schemes", ["bf16", pytest.param("w4a16:g32:rollout,bf16", marks=pytest.mark.slow)])
def test_two_steps(schemes, tiny_model, flags, tmp_path, capsys):
    out = tmp_path / "ablation"
    shared = flags(tiny_model("qwen2", hidden=128)) | {"objective.band_scale": 20, "objective.drop": True, "sync.probe_tol": 0.1}
    for name in ("ckpt.output_dir", "ckpt.path"):
        del shared[name]
    command = ["--arms", "tbpo", "--schemes", schemes, "--seeds", "1", "--out", str(out), *argv(shared)]
    ablate_objectives.main(command)
    capsys.readouterr()

    rows = {row["scheme"]: row for row in csv.DictReader(open(out / "summary.csv"))}
    assert set(rows) == set(schemes.split(","))
    for scheme, row in rows.items():
        assert (row["status"], row["steps"], row["collapsed"], row["seed"]) == ("finished", "2", "no", "1")
        directory = out / "tbpo" / scheme.replace(":", "-") / "seed1"
        check_run(directory, scheme)
        assert not (directory / "model").exists()
        assert json.loads((directory / "start_policy.json").read_text())
        assert f"| tbpo | {scheme} | 1 | 2 |" in (out / "summary.md").read_text()
    by = ["reward_by_objective", "entropy_by_objective", "mismatch_by_objective", "kl_by_objective"]
    for picture in [*by, "reward_by_scheme"] if len(rows) > 1 else by:
        assert (out / f"{picture}.png").stat().st_size > 1000

    before = (directory / "metrics.jsonl").read_bytes()
    ablate_objectives.main(command)
    assert capsys.readouterr().out.count("finished before") == len(rows)
    assert (directory / "metrics.jsonl").read_bytes() == before

    report_cli.main(["--tokens", str(out / "tbpo")])
    assert "Step 2" in (directory / "tokens.html").read_text()


def check_run(directory, scheme):
    rows = load_run(directory).rows
    for row in rows:
        assert row["sync/checksum_ok"] == 1 and row["sync/probe_abs_logp"] < 0.1
        assert row["objective/in_band_frac_by_update/0"] == 1.0 or scheme != "bf16"
        # the start policy's own log-probs, then those of the policy that was just published: a BF16 engine's noise at least, and
        # at most what four updates at a learning rate of 1e-3 do to the one response of 12 tokens that is kept: e^d - 1 - d of a
        # token that has become d = 4 nats likelier is 50 (means of 1.1 and 7.9 seen)
        assert 0 <= row["policy/kl_start"] < 50 and row["policy/kl_start_tokens"] >= 1
        assert 0 < row["timing/diagnostics"] < 0.2 * row["timing/step_total"]
        assert math.isfinite(row["policy/entropy_sampled"]) and 0 < row["is/ess"] <= 1
        assert any(name.startswith("error_token/repeat_rate_") for name in row)
    counts = load_histograms(directory)
    assert list(counts.steps) == [1, 2]
    tokens = sum(row["rollout/tokens"] for row in rows)
    assert counts.total("mismatch").sum() == counts.total("ratio").sum() == counts.total("region").sum() == tokens
    regions = counts.total("region").sum(axis=(0, 1))
    outside = 1 - regions[counts.bins["region"].index("inside")] / tokens
    assert (outside > 0) == any(row["objective/in_band_frac"] < 1 for row in rows)
    assert rows[-1]["mismatch/abs_logp_mean"] < 0.05 or scheme != "bf16"
    picture = directory / "ratio_histogram.png"
    assert picture.stat().st_size > 1000
    notes = (directory / "notes.jsonl").read_text()
    assert "bands are scaled by --objective.band_scale 20" in notes
