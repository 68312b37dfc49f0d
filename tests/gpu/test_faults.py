"""Faults of a colocated push (transport ipc): each ends in an error that names engine and tensor, in time, and leaves nothing.

After every test the card holds what it held before, to within ``SLACK``; where processes of others use it, too, that cannot be
measured and only the processes are counted.
"""

import glob
import os
import signal
import time

import psutil
import pytest
import ray
import torch
from vllm import SamplingParams

from qarl_openrlhf.engine.state import EngineNotReady
from qarl_openrlhf.sync.errors import SyncError
from qarl_openrlhf.sync.publisher import Publisher
from qarl_openrlhf.sync.transport import Sending, ipc

from . import engines
from .test_parity import assert_same

SLACK = 2**29  # bytes: workspaces that are made on first use
BUCKET = r"bucket \d+ \(model\.\S+ \.\.\. \S+\)"


# ---- what is held ----------------------------------------------------------------------------------------------------------


def others() -> set[int]:
    """Processes with CUDA loaded that this one has not started."""
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    found = set()
    for path in glob.glob("/proc/[0-9]*/maps"):
        pid = int(path.split("/")[2])
        try:
            with open(path) as maps:
                if pid not in ours and "libcuda.so" in maps.read():
                    found.add(pid)
        except OSError:  # it has ended
            continue
    return found


def held() -> int | None:
    """Bytes in use on the card by this process and what it has started; None where others use it, too."""
    if others():
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def assert_held_at_most(limit: int, timeout_s: float = 20) -> None:
    until = time.monotonic() + timeout_s
    while (now := held()) is not None and now > limit:
        assert time.monotonic() < until, f"{now / 2**20:.0f} MiB of the card are in use, at most {limit / 2**20:.0f} expected"
        time.sleep(0.5)


@pytest.fixture(autouse=True)
def nothing_is_left(bench):
    before, alone = held(), not others()
    if before is None:
        print("others use this card: its memory is not compared")
    yield
    if before is not None and alone:
        assert_held_at_most(before + SLACK)


# ---- engines ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(cluster, tmp_path_factory):
    """A learner and two engines; the second one is there to be killed."""
    learner = engines.make_learner("qwen3", "w4a16", tmp_path_factory.mktemp("faults"))
    pair = [engines.start(learner) for _ in range(2)]
    engines.tiny.ready(*pair)
    for engine in pair:  # what is made on first use is made before anything is measured
        warm = engines.Bench(learner, [engine], "ipc")
        warm.publish()
        engines.sample(engine)
        assert_same(warm)
        warm.publisher.close()
    return learner, pair


@pytest.fixture(scope="module")
def versions():
    """Grows over the tests: an engine is given each version once."""
    return iter(range(100, 10_000, 100))


@pytest.fixture
def bench(started, versions):
    learner, pair = started
    made = engines.Bench(learner, pair[:1], "ipc", timeout_s=20)
    made.version = next(versions)
    made.publish()
    yield made
    made.publisher.close()


def publisher(handles: list, **options) -> Publisher:
    return Publisher(handles, transport="ipc", device=torch.device("cuda:0"), **options)


def refusal(engine) -> Exception | None:
    try:
        ray.get(engine.generate.remote([5, 6], SamplingParams(max_tokens=2)), timeout=60)
    except Exception as error:
        return error
    return None


def state(engine) -> str:
    return ray.get(engine.weights_state.remote(), timeout=30)["state"]


def assert_refuses_then_heals(bench) -> None:
    for engine in bench.engines:
        assert state(engine) == "FAILED"
        error = refusal(engine)
        assert isinstance(error, EngineNotReady) and "FAILED" in str(error)
    bench.train_step(bench.version)
    bench.publish()
    assert_same(bench)


def interrupted(tensors: dict, at: int, act):
    """The tensors of a publish; ``act()`` is called before tensor number ``at``."""
    for i, pair in enumerate(tensors.items()):
        if i == at:
            act()
        yield pair


# ---- faults ----------------------------------------------------------------------------------------------------------------


def test_a_bit_flipped_in_a_bucket(bench, monkeypatch):
    send, sent = ipc.Sender.send, []

    def flip(self, flat):
        sent.append(flat)
        if len(sent) == 2:  # an earlier bucket has been loaded
            flat[40] ^= 1
        return send(self, flat)

    monkeypatch.setattr(ipc.Sender, "send", flip)
    with pytest.raises(SyncError, match=rf"{BUCKET}: engine 0: rank 0: ManifestError: tensor model\.\S+ arrived with checksum"):
        bench.publish()
    monkeypatch.undo()
    sent.clear()
    assert_refuses_then_heals(bench)


def test_an_engine_out_of_memory_while_it_loads(bench):
    """Nothing is pretended: the engine's process may not take more from the card, and all that it has is filled."""

    def fill(worker):
        import torch

        total = torch.cuda.get_device_properties(worker.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        worker.qarl_test_filling = []
        size = 2**26
        while size >= 512:
            try:
                worker.qarl_test_filling.append(torch.empty(size, dtype=torch.uint8, device=worker.device))
            except torch.OutOfMemoryError:
                size //= 2

    def give_back(worker):
        import torch

        del worker.qarl_test_filling
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()

    engines.tiny.on_workers(bench.engines[0], fill)
    try:
        with pytest.raises(SyncError, match=rf"{BUCKET}: engine 0: rank 0: OutOfMemoryError"):
            bench.publish()
    finally:
        engines.tiny.on_workers(bench.engines[0], give_back)
    assert_refuses_then_heals(bench)


def test_a_send_that_never_ends(bench, monkeypatch):
    send = ipc.Sender.send

    class Never:
        def is_completed(self):
            return False

    monkeypatch.setattr(ipc.Sender, "send", lambda self, flat: Sending(Never(), send(self, flat).ticket))
    bench.publisher.timeout_s = 5
    begun = time.monotonic()
    with pytest.raises(SyncError, match=rf"{BUCKET}: no answer from the transport within the publish's 5 s"):
        bench.publish()
    assert time.monotonic() - begun < 15
    monkeypatch.undo()
    bench.publisher.timeout_s = 20
    assert_refuses_then_heals(bench)


def test_an_engine_that_hangs_in_a_bucket(bench):
    bench.publisher.close()
    bench.publisher = publisher(bench.engines, bucket_mb=0.1, timeout_s=6)
    pid = engines.tiny.process_id(bench.engines[0])
    stop = interrupted(bench.learner.tensors(), 20, lambda: os.kill(pid, signal.SIGSTOP))
    begun = time.monotonic()
    try:
        with pytest.raises(SyncError, match=rf"{BUCKET}: no answer from engine 0"):
            bench.publisher.publish(stop, bench.version + 1)
        assert time.monotonic() - begun < 6 + 12
        assert state(bench.engines[0]) == "FAILED"
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(7)  # what the engine had still to answer runs into its time limit
    bench.version += 1
    assert_refuses_then_heals(bench)


def test_a_learner_that_is_killed_in_a_push(bench):
    """Its engine refuses to generate after the time limit at the latest, and the next learner takes it over."""
    tensors = ray.put({name: tensor.cpu() for name, tensor in bench.learner.tensors().items()})
    bench.publisher.close()

    @ray.remote(num_cpus=0, num_gpus=0.1)
    class Doomed:
        def pid(self):
            return os.getpid()

        def publish(self, engines, tensors, version):
            sent = []

            def hang(sender, flat):
                sent.append(flat)
                if len(sent) == 3:
                    time.sleep(1000)
                return send(sender, flat)

            send, ipc.Sender.send = ipc.Sender.send, hang
            on_card = ((name, tensor.cuda()) for name, tensor in tensors.items())
            options = {"transport": "ipc", "device": torch.device("cuda:0"), "bucket_mb": 0.2, "timeout_s": 6}
            Publisher(engines, **options).publish(on_card, version)

    engine = bench.engines[0]
    doomed = Doomed.remote()
    process = psutil.Process(ray.get(doomed.pid.remote(), timeout=60))
    doomed.publish.remote(bench.engines, tensors, bench.version + 1)
    until = time.monotonic() + 60
    while state(engine) != "UPDATING":
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(1.5)  # two buckets are loaded, the third never comes
    process.kill()
    begun = time.monotonic()
    assert isinstance(refusal(engine), EngineNotReady)
    assert time.monotonic() - begun < 15
    process.wait(10)
    bench.publisher = publisher(bench.engines, bucket_mb=0.5, timeout_s=20)
    bench.version += 1
    bench.train_step(bench.version)
    bench.publish()
    assert_same(bench)


def test_an_engine_that_is_killed_in_a_bucket(bench, started):
    """Of two engines one dies: the publish names it, its process and its memory are gone, and the other one goes on."""
    first, second = started[1]
    core = psutil.Process(engines.tiny.process_id(second))
    bench.publisher.close()  # one learner at a time
    both = engines.Bench(bench.learner, [first, second], "ipc", bucket_mb=0.1, timeout_s=30)
    both.version = bench.version + 1
    both.publish()
    before = held()
    both.version += 1
    begun = time.monotonic()
    with pytest.raises(SyncError, match="engine 1: the engine is dead"):
        both.publisher.publish(interrupted(both.learner.tensors(), 20, lambda: ray.kill(second)), both.version)
    assert time.monotonic() - begun < 15
    core.wait(20)  # TimeoutExpired if the process with the model outlives its actor
    both.publisher.close()
    if before is not None:
        assert_held_at_most(before - 2**28)  # its KV cache alone is that large
    bench.version = both.version
    assert_refuses_then_heals(bench)
