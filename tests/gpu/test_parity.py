"""vLLM's low-bit kernels compute with the learner's weights: bit for bit after every push, under CUDA graphs."""

import pytest
import ray
import torch

from qarl_openrlhf.quant import dequantize_weight

from . import engines

CASES = {
    "bf16": ("qwen3", "bf16"),
    "w4a16": ("qwen3", "w4a16"),
    "w4a16-bias": ("qwen2", "w4a16:g64"),
    "w8a8": ("qwen2", "w8a8"),
    "fp8": ("qwen3", "fp8"),
    "w4a8": ("qwen3", "w4a8"),
}


@pytest.fixture(scope="module")
def benches(cluster, tmp_path_factory):
    learners = {
        case: engines.make_learner(kind, scheme, tmp_path_factory.mktemp(case)) for case, (kind, scheme) in CASES.items()
    }
    actors = {case: engines.start(learner) for case, learner in learners.items()}
    made = {}
    for case in CASES:
        try:
            engines.tiny.ready(actors[case])
            made[case] = engines.Bench(learners[case], [actors[case]], "ipc")
        except Exception as error:
            made[case] = error
    return made


@pytest.fixture(params=list(CASES))
def bench(request, benches):
    if isinstance(benches[request.param], Exception):
        raise benches[request.param]
    return benches[request.param]


def effective(learner) -> dict[str, torch.Tensor]:
    modules = learner.model.named_modules()
    return {name: dequantize_weight(m.packed(), m.weight.dtype).cpu() for name, m in modules if getattr(m, "scheme", None)}


def assert_same(bench) -> None:
    text = list(range(3, 200))
    mine = bench.learner.log_probs(text)
    for engine in bench.engines:
        theirs = torch.tensor(ray.get(engine.probe_logprobs.remote([text]), timeout=60)[0])
        gap = float((mine.cpu() - theirs).abs().mean())
        print(f"{bench.learner.scheme}: mean |delta logp| {gap:.5f}")
        assert gap < 0.06
        if bench.learner.scheme.name == "w4a16":
            wanted = effective(bench.learner)
            got = ray.get(engine.effective_weights.remote(), timeout=60)
            assert got.keys() == wanted.keys() and len(wanted) == 14
            for name in wanted:
                assert torch.equal(got[name], wanted[name]), name


def test_pushes_reach_the_kernels(bench, tmp_path):
    metrics = bench.publish()
    assert metrics["sync/checksum_ok"] == 1.0
    assert metrics["sync/buckets"] > 1
    assert_same(bench)
    before = engines.sample(bench.engines[0])
    for seed in (1, 2):
        bench.train_step(seed)
        bench.publish()
    assert_same(bench)
    after = engines.sample(bench.engines[0])
    assert before[0] != after[0]
    fresh = ray.get(engines.sample_from_export.remote(engines.export(bench.learner, tmp_path / "export")), timeout=300)
    assert fresh[0] == after[0]
    assert torch.equal(fresh[1], after[1])
