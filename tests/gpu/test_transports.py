"""Two GPUs: NCCL between them, CUDA IPC across them, engines that are tensor parallel, and faults."""

import time

import pytest
import ray
import torch

from qarl_openrlhf.sync.errors import SyncError
from qarl_openrlhf.sync.transport import nccl

from . import engines
from .test_parity import MOE, assert_same

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def learner_gpu() -> str:
    return f"cuda:{torch.cuda.device_count() - 1}"


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    made = engines.make_learner("qwen3", "w4a16", tmp_path_factory.mktemp("nccl"))
    made.model.to(learner_gpu())
    return made


@pytest.fixture(scope="module")
def started(cluster, learner):
    """One engine on the first GPU, one tensor parallel over both, started together."""
    one = engines.start(learner, ray_gpus=0.5)
    two = engines.start(learner, ray_gpus=0, tp=2, distributed_executor_backend="mp")
    engines.tiny.ready(one)
    return one, two


@pytest.fixture(scope="module")
def experts(cluster, started, tmp_path_factory):
    """A mixture of experts, half of them on each GPU; and the same engine with a half of every expert, one group, on each."""
    sizes = MOE | {"moe_intermediate_size": 256}
    learner = engines.make_learner("qwen3_moe", "w4a16", tmp_path_factory.mktemp("moe"), **sizes)
    learner.model.to(learner_gpu())
    across = dict(ray_gpus=0, tp=2, distributed_executor_backend="mp")
    return learner, [engines.start(learner, enable_expert_parallel=split, **across) for split in (True, False)]


@pytest.fixture
def one(started, learner):
    bench = engines.Bench(learner, [started[0]], "nccl", learner_gpu(), timeout_s=20)
    bench.version = 100
    yield bench
    bench.publisher.close()


def test_nccl_between_gpus(one):
    for seed in range(3):
        one.train_step(seed)
        metrics = one.publish()
        assert metrics["sync/checksum_ok"] == 1.0
    assert_same(one)


def test_ipc_to_an_engine_on_another_gpu(started, learner):
    bench = engines.Bench(learner, [started[0]], "ipc", learner_gpu())
    bench.version = 200
    for seed in range(3):
        bench.train_step(seed + 10)
        bench.publish()
    assert_same(bench)


def test_a_bit_flipped_on_the_way(one, monkeypatch):
    send = nccl.Sender.send

    def flip(self, flat):
        torch.cuda.synchronize(flat.device)
        flat[40] ^= 1
        return send(self, flat)

    monkeypatch.setattr(nccl.Sender, "send", flip)
    with pytest.raises(SyncError, match=r"engine 0: rank 0: ManifestError: tensor model\.\S+ arrived with checksum"):
        one.publish()
    monkeypatch.undo()
    with pytest.raises(Exception, match="FAILED"):
        engines.sample(one.engines[0])
    one.publish()
    assert_same(one)


def test_a_send_that_never_comes_ends_in_time(one, monkeypatch):
    one.publish()

    class Never:
        def is_completed(self):
            return False

    monkeypatch.setattr(nccl.Sender, "send", lambda self, flat: nccl.Sending(Never()))
    one.publisher.timeout_s = 5
    begun = time.monotonic()
    with pytest.raises(SyncError, match="no answer from engine 0"):
        one.publish()
    assert time.monotonic() - begun < 15
    monkeypatch.undo()
    one.publisher.timeout_s = 20
    time.sleep(6)  # the engine's own wait ends, too
    one.publish()
    assert_same(one)


def test_an_engine_on_the_learners_gpu_is_refused(started, learner):
    bench = engines.Bench(learner, [started[0]], "nccl", "cuda:0", timeout_s=20)
    bench.version = 300
    learner.model.to("cuda:0")
    try:
        with pytest.raises(SyncError, match="use --sync.transport ipc"):
            bench.publish()
    finally:
        learner.model.to(learner_gpu())
        learner.model.quant_cache.invalidate()


def test_tensor_parallel_engine(started, learner):
    engines.tiny.ready(started[1])
    bench = engines.Bench(learner, [started[1]], "ipc", learner_gpu())
    bench.version = 400
    for seed in range(2):
        bench.train_step(seed + 20)
        metrics = bench.publish()
        assert metrics["sync/checksum_ok"] == 1.0
    assert_same(bench)


def test_experts_split_over_the_gpus(started, experts):
    """Expert parallel and tensor parallel engines are given one push, each rank its own experts or its part of each."""
    learner, split = experts
    engines.tiny.ready(*split)
    bench = engines.Bench(learner, split, "ipc", learner_gpu())
    for seed in range(2):
        bench.train_step(seed + 30)
        metrics = bench.publish()
        assert metrics["sync/checksum_ok"] == 1.0
    assert_same(bench)
    (tokens, log_probs), (theirs, their_log_probs) = (engines.sample(engine) for engine in split)
    first = torch.tensor([mine[0] == other[0] for mine, other in zip(tokens, theirs)])  # of one context
    assert first.float().mean() >= 0.5
    assert (log_probs[first, 0] - their_log_probs[first, 0]).abs().mean() < 0.1


def test_a_killed_engine_is_named(cluster, learner):
    engine = engines.start(learner, ray_gpus=0.3)
    engines.tiny.ready(engine)
    bench = engines.Bench(learner, [engine], "nccl", learner_gpu(), timeout_s=20)
    bench.publish()
    ray.kill(engine)
    begun = time.monotonic()
    with pytest.raises(SyncError, match="engine 0"):
        bench.publish()
    assert time.monotonic() - begun < 15
