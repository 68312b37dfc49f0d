"""bench_sync: a dry run on a CPU, and what it refuses."""

import json

import pytest
import ray

from qarl_openrlhf.bench import sync, sync_room
from qarl_openrlhf.cli import bench_sync
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.quant.errors import QuantError


@pytest.fixture
def ends_ray():
    """bench_sync leaves its Ray head to the end of its process, which here has tests with heads of other sizes."""
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--shape", "30b-a3b", "--openrlhf"], "of experts the learner holds one layer: use a dense --shape"),
        (["--shape", "tiny", "--transport", "gloo", "--openrlhf"], "--openrlhf needs GPUs"),
        (["--transport", "ipc", "--tp", "2"], "learner and engine share one GPU; use --transport nccl"),
        (["--transport", "ipc", "--learner_ranks", "2"], "each rank would need an engine on its GPU; use --transport nccl"),
        (["--openrlhf", "--learner_ranks", "2"], "measured from one learner"),
        (["--learner_ranks", "0"], "'0': a whole number of at least 1"),
        (["--tp", "²"], "'²': a whole number of at least 1"),
        (["--layers", "0"], "'0': a whole number of at least 1"),
        (["--bucket_mb", "-5"], "'-5': a whole number of at least 1"),
        (["--tp", "3"], "--tp 3 does not divide the 32 attention heads of 8b: use 1, 2, 4, 8"),
        (["--expert_parallel", "--tp", "2"], "which has no experts: use a --shape of experts (30b-a3b, tiny-moe)"),
        (["--expert_parallel", "--shape", "30b-a3b"], "one rank holds all experts anyway; use --tp 2 or more"),
        (
            ["--expert_parallel", "--shape", "tiny-moe", "--tp", "2", "--transport", "gloo"],
            "an engine on a CPU does not spread experts",
        ),
        (
            ["--shape", "tiny-moe", "--tp", "2", "--schemes", "w4a16", "--transport", "gloo"],
            "experts.down_proj [512, 128] cannot run w4a16 at TP 2",
        ),
        (["--transport", "gloo", "--shape", "tiny", "--learner_ranks", "100000"], "100000 learner processes and an engine need about"),
        (["--transport", "gloo", "--schemes", "w4a8"], "w4a8 needs a GPU engine"),
        (["--transport", "gloo", "--schemes", "w5"], "'w5' is unknown"),
    ],
)
def test_refused_before_anything_starts(capsys, words, message):
    with pytest.raises(SystemExit):
        bench_sync.main(words)
    assert message in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_what_would():
    def check(words: str, scheme: str, gib: int) -> None:
        sync_room.check(bench_sync._parser().parse_args(words.split()), scheme, gib * 2**30)

    check("--shape 30b-a3b --learner_ranks 2 --tp 2", "w4a16", 80)
    check("--shape 8b --learner_ranks 2", "bf16", 40)
    with pytest.raises(ConfigError, match=r"30b-a3b in w4a16: each engine rank's GPU needs about \S+ GiB.*a larger --tp"):
        check("--shape 30b-a3b --learner_ranks 2", "w4a16", 24)
    with pytest.raises(ConfigError, match="8b in w4a16: the learner's GPU needs .* more --learner_ranks"):
        check("--shape 8b --tp 4", "w4a16", 20)
    check("--shape 8b --tp 4 --learner_ranks 4", "w4a16", 20)
    with pytest.raises(ConfigError, match="the GPU needs .* --transport nccl on two"):
        check("--shape 8b --transport ipc", "bf16", 40)
    with pytest.raises(QuantError, match=r"down_proj \[2048, 768\] cannot run w4a16 at TP 4"):
        check("--shape 30b-a3b --tp 4", "w4a16", 80)
    check("--shape 30b-a3b --tp 4 --expert_parallel", "w4a16", 80)  # experts stay whole


def test_what_a_cpu_run_needs_of_main_memory():
    def check(words: str, scheme: str, gib: int) -> None:
        sync_room.check_host(bench_sync._parser().parse_args(words.split()), scheme, gib * 2**30)

    check("--shape tiny-moe --learner_ranks 2", "bf16", 8)
    check("--shape 8b --layers 2", "w4a16", 16)
    with pytest.raises(ConfigError, match="8b in bf16 on a CPU: 1 learner processes .* need about 3[2-9].* has 16.*--shape tiny or tiny-moe, fewer"):
        check("--shape 8b", "bf16", 16)


def test_results_of_different_runs_have_different_names(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    args = bench_sync._parser().parse_args(["--shape", "8b", "--tp", "2", "--layers", "4"])
    assert bench_sync.result_name(args, "3 x NVIDIA H100 80GB HBM3") == "sync_8b_nccl_tp2_4layers_h100.json"
    args = bench_sync._parser().parse_args(["--shape", "30b-a3b", "--tp", "2", "--learner_ranks", "2", "--expert_parallel"])
    assert bench_sync.result_name(args, "4 x NVIDIA H100 80GB HBM3") == "sync_30b-a3b_nccl_zero3x2_tp2_ep_h100.json"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert bench_sync.result_name(bench_sync._parser().parse_args([]), "2 x NVIDIA H200") == "sync_8b_nccl_no_p2p_h200.json"


@pytest.mark.slow
def test_pushes_of_experts_on_a_cpu(tmp_path, ends_ray):
    words = ["--shape", "tiny-moe", "--schemes", "bf16", "w4a16", "--transport", "gloo", "--pushes", "2", "--out", str(tmp_path)]
    bench_sync.main(words)
    bf16, w4a16 = json.loads((tmp_path / "sync_tiny-moe_gloo_cpu.json").read_text())["rows"]
    assert bf16["checksum_ok"] == w4a16["checksum_ok"] == 1.0 and w4a16["p50_ms"] > 0
    assert w4a16["bytes"] < 0.55 * bf16["bytes"]  # embeddings and lm_head, a fourth of this model, stay BF16


def published(shape: str, scheme: str) -> str:
    """Fingerprint of what one learner publishes, in this process."""
    learner, mark = sync.Learner(shape, None, scheme, device="cpu"), sync.Fingerprint()
    for _ in mark.watch(learner.tensors()):
        pass
    return str(mark)


@pytest.mark.slow
@pytest.mark.parametrize("shape, schemes", [("tiny-moe", ["w4a16"]), ("tiny", ["bf16", "w8a8"])])
def test_shards_on_two_ranks_publish_the_bytes_of_one_learner(tmp_path, ends_ray, shape, schemes):
    """A real engine proves every tensor's checksum; the tensors are those that an unsharded learner has."""
    words = ["--shape", shape, "--transport", "gloo", "--learner_ranks", "2", "--pushes", "1", "--out", str(tmp_path)]
    bench_sync.main([*words, "--schemes", *schemes])
    rows = json.loads((tmp_path / f"sync_{shape}_gloo_zero3x2_cpu.json").read_text())["rows"]
    assert [row["scheme"] for row in rows] == schemes
    for row in rows:
        assert row["checksum_ok"] == 1.0 and row["published"] == published(shape, row["scheme"])
        assert 0 < row["gather_ms"] < row["p50_ms"] and row["gather_only_ms"] > 0
