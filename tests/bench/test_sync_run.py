"""bench_sync: a dry run on a CPU, and what it refuses."""

import json

import pytest

from qarl_openrlhf.cli import bench_sync


@pytest.mark.parametrize(
    "words, message",
    [
        (["--shape", "30b-a3b", "--openrlhf"], "of experts the learner holds one layer: use a dense --shape"),
        (["--shape", "tiny", "--transport", "gloo", "--openrlhf"], "--openrlhf needs GPUs"),
        (["--transport", "ipc", "--tp", "2"], "learner and engine share one GPU; use --transport nccl"),
        (["--transport", "gloo", "--schemes", "w4a8"], "w4a8 needs a GPU engine"),
        (["--transport", "gloo", "--schemes", "w5"], "'w5' is unknown"),
    ],
)
def test_refused_before_anything_starts(capsys, words, message):
    with pytest.raises(SystemExit):
        bench_sync.main(words)
    assert message in capsys.readouterr().err


def test_results_of_different_runs_have_different_names(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    args = bench_sync._parser().parse_args(["--shape", "8b", "--tp", "2", "--layers", "4"])
    assert bench_sync.result_name(args, "3 x NVIDIA H100 80GB HBM3") == "sync_8b_nccl_tp2_4layers_h100.json"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert bench_sync.result_name(bench_sync._parser().parse_args([]), "2 x NVIDIA H200") == "sync_8b_nccl_no_p2p_h200.json"


@pytest.mark.slow
def test_pushes_of_experts_on_a_cpu(tmp_path):
    words = ["--shape", "tiny-moe", "--schemes", "bf16", "w4a16", "--transport", "gloo", "--pushes", "2", "--out", str(tmp_path)]
    bench_sync.main(words)
    bf16, w4a16 = json.loads((tmp_path / "sync_tiny-moe_gloo_cpu.json").read_text())["rows"]
    assert bf16["checksum_ok"] == w4a16["checksum_ok"] == 1.0 and w4a16["p50_ms"] > 0
    assert w4a16["bytes"] < 0.55 * bf16["bytes"]  # embeddings and lm_head, a fourth of this model, stay BF16
