"""Updates that go wrong end in an error that names tensor and engine, and never in a rollout on half-updated weights."""

import asyncio
import os
import signal
import time

import psutil
import pytest
import ray
import torch
from vllm import SamplingParams

from qarl_openrlhf.engine import clean_up
from qarl_openrlhf.engine.state import EngineNotReady
from qarl_openrlhf.sync.errors import SyncError
from qarl_openrlhf.sync.publisher import Publisher
from qarl_openrlhf.sync.transport import gloo

from . import tiny
from .conftest import refusal, sampling_calls

TEXT = list(range(3, 60))
LAYER = "model.layers.1.mlp.down_proj"


def assert_failed(bench, *words: str) -> None:
    """All engines are FAILED and refuse every kind of request, saying why."""
    for engine, state in zip(bench.engines, bench.states(), strict=True):
        assert state["state"] == "FAILED"
        for call in sampling_calls(engine):
            error = refusal(call)
            assert isinstance(error, EngineNotReady)
            for word in ("FAILED", *words):
                assert word in str(error)


def assert_heals(bench) -> None:
    bench.publish()
    mine = bench.learner.log_probs(TEXT)
    for engine, state in zip(bench.engines, bench.states(), strict=True):
        assert (state["state"], state["version"]) == ("READY", bench.version)
        assert (tiny.probe(engine, TEXT) - mine).abs().max() < 1e-3


def without(tensors: dict, name: str) -> list:
    return [(n, t) for n, t in tensors.items() if n != name]


def instead(tensors: dict, name: str, tensor) -> list:
    return [(n, tensor if n == name else t) for n, t in tensors.items()]


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[3] = value
    return changed


BROKEN = {
    "missing": (lambda t: without(t, f"{LAYER}.weight_packed"), f"{LAYER}.weight_packed", "lacks 1"),
    "missing norm": (lambda t: without(t, "model.norm.weight"), "model.norm.weight", "lacks 1"),
    "extra": (lambda t: [*t.items(), (f"{LAYER}.bias", torch.zeros(128))], f"{LAYER}.bias", "not one of"),
    "NaN scale": (
        lambda t: instead(t, f"{LAYER}.weight_scale", with_value(t[f"{LAYER}.weight_scale"], float("nan"))),
        f"{LAYER}.weight_scale",
        "1 NaN or infinite",
    ),
    "infinite norm": (
        lambda t: instead(t, "model.norm.weight", with_value(t["model.norm.weight"], float("inf"))),
        "model.norm.weight",
        "1 NaN or infinite",
    ),
    "shape": (
        lambda t: instead(t, f"{LAYER}.weight_packed", t[f"{LAYER}.weight_packed"][:, :8]),
        f"{LAYER}.weight_packed",
        "[128, 24]",
    ),
    "dtype": (lambda t: instead(t, "model.norm.weight", t["model.norm.weight"].bfloat16()), "model.norm.weight", "float32"),
    "twice": (lambda t: [*t.items(), ("model.norm.weight", t["model.norm.weight"])], "model.norm.weight", "twice"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_wrong_tensors(qwen3, fault):
    qwen3.publish()
    change, tensor, detail = BROKEN[fault]
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        qwen3.publish(change(qwen3.learner.tensors()))
    assert time.monotonic() - started < 35  # it need not wait for its 60 s
    assert tensor in str(caught.value) and detail in str(caught.value)
    if fault != "twice":  # that one is the learner's fault, no engine saw it
        assert "engine 0" in str(caught.value)
    assert_failed(qwen3, tensor)
    assert_heals(qwen3)


def test_a_bit_flipped_on_the_way(qwen3, monkeypatch):
    qwen3.publish()
    send = gloo.Sender.send
    sent = []

    def flip(self, flat):
        sent.append(flat)
        if len(sent) == 3:
            flat[40] ^= 1
        return send(self, flat)

    monkeypatch.setattr(gloo.Sender, "send", flip)
    with pytest.raises(SyncError, match=r"engine 0: rank 0: ManifestError: tensor model\.\S+ arrived with checksum"):
        qwen3.publish()
    monkeypatch.undo()
    assert_failed(qwen3, "checksum")
    assert_heals(qwen3)


def test_a_weight_that_the_engine_stores_wrongly_is_read_back(qwen3):
    """A loader that drops a tensor: the checksums on the wire are right, the engine's memory is not."""

    def drop(worker) -> None:
        worker.model_runner.get_model().model.norm.weight.weight_loader = lambda parameter, loaded: None

    def mend(worker) -> None:
        del worker.model_runner.get_model().model.norm.weight.weight_loader

    qwen3.publish()
    tiny.on_workers(qwen3.engines[0], drop)
    norm = qwen3.learner.model.model.norm.weight
    with torch.no_grad():
        norm.add_(0.5)
    with pytest.raises(SyncError, match=r"engine 0: rank 0: ManifestError: tensor model\.norm\.weight reads back differently"):
        qwen3.publish()
    tiny.on_workers(qwen3.engines[0], mend)
    assert_heals(qwen3)


def test_the_learner_failing_half_way(qwen3):
    qwen3.publish()
    taken = []

    def tensors():
        for i, pair in enumerate(qwen3.learner.tensors().items()):
            taken.append(pair[0])
            if i == 20:
                raise FloatingPointError("model.layers.0: weights diverged")
            yield pair

    with pytest.raises(FloatingPointError, match="diverged"):
        qwen3.publish(tensors())
    assert_failed(qwen3, "model.layers.0: weights diverged")
    assert_heals(qwen3)


def test_a_failed_publish_still_exhausts_the_tensors(qwen3):
    """Other ZeRO-3 ranks gather in step with this iterator: it must not stop in the middle."""
    taken = []

    def tensors():
        for name, tensor in qwen3.learner.tensors().items():
            taken.append(name)
            yield name, (with_value(tensor, float("nan")) if name == "model.embed_tokens.weight" else tensor)

    with pytest.raises(SyncError, match="model.embed_tokens.weight"):
        qwen3.publish(tensors())
    assert taken == list(qwen3.learner.tensors())
    assert_heals(qwen3)


def test_requests_in_flight_are_frozen_and_go_on_with_the_new_weights(qwen3):
    qwen3.publish()
    params = SamplingParams(temperature=1.0, max_tokens=250, ignore_eos=True, seed=1)
    calls = [qwen3.engines[0].generate.remote([5 + i, 6, 7], params) for i in range(4)]
    time.sleep(0.3)
    began = qwen3.version
    for _ in range(2):
        qwen3.publish()
    late = qwen3.engines[0].generate.remote([5, 6, 7], SamplingParams(max_tokens=2))
    outputs = ray.get(calls, timeout=60)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [250] * 4
    assert [output.weight_version for output in outputs] == [began] * 4
    assert ray.get(late, timeout=60).weight_version == qwen3.version


def test_requests_in_flight_are_aborted_if_the_update_fails(qwen3):
    qwen3.publish()
    params = SamplingParams(temperature=1.0, max_tokens=350, ignore_eos=True)
    calls = [qwen3.engines[0].generate.remote([5 + i, 6, 7], params) for i in range(4)]
    time.sleep(0.2)
    with pytest.raises(SyncError):
        qwen3.publish(without(qwen3.learner.tensors(), "model.norm.weight"))
    for call in calls:
        assert isinstance(refusal(call), EngineNotReady)
    assert_heals(qwen3)


def test_engines_of_a_push_that_is_judged_wrong_afterwards_sample_nothing_more(qwen3):
    """As after a probe that fails: the push was complete, and requests that it had frozen go on."""
    qwen3.publish()
    params = SamplingParams(temperature=1.0, max_tokens=350, ignore_eos=True)
    calls = [engine.generate.remote([5 + i, 6, 7], params) for i in range(4) for engine in qwen3.engines]
    time.sleep(0.2)
    qwen3.publish()
    qwen3.publisher.abandon(f"version {qwen3.version}: engine 1 disagrees with the learner")
    for call in calls:
        assert isinstance(refusal(call), EngineNotReady)
    assert_failed(qwen3, "engine 1 disagrees with the learner")
    assert_heals(qwen3)


def test_a_request_that_enters_only_after_the_update_has_failed_is_no_rollout(qwen3):
    """It was let in under whole weights; vLLM prepares requests in a thread, of many or with images for seconds."""
    qwen3.publish()
    engine = qwen3.engines[0]

    def hold(actor) -> None:
        actor.held, inputs = asyncio.Event(), actor.llm.input_processor
        prepare = actor.prepare = inputs.process_inputs_async

        async def late(*args, **kwargs):
            await actor.held.wait()
            return await prepare(*args, **kwargs)

        inputs.process_inputs_async = late

    def let_go(actor) -> None:
        actor.llm.input_processor.process_inputs_async = actor.prepare
        actor.llm.output_handler.get_loop().call_soon_threadsafe(actor.held.set)

    ray.get(engine.__ray_call__.remote(hold), timeout=30)
    calls = sampling_calls(engine)
    time.sleep(0.5)
    with pytest.raises(SyncError):
        qwen3.publish(without(qwen3.learner.tensors(), "model.norm.weight"))
    ray.get(engine.__ray_call__.remote(let_go), timeout=30)
    for call in calls:
        error = refusal(call)
        assert isinstance(error, EngineNotReady) and "model.norm.weight" in str(error), error
    assert_heals(qwen3)


def test_requests_in_flight_are_aborted_however_late_a_worker_answers(qwen3):
    """A worker that waits for a peer keeps the clean-up waiting for longer than the update that failed waits for it."""
    qwen3.publish()
    qwen3.publisher.close()
    engine = qwen3.engines[0]
    params = SamplingParams(temperature=1.0, max_tokens=350, ignore_eos=True)
    calls = [engine.generate.remote([5 + i, 6, 7], params) for i in range(4)]
    time.sleep(0.2)
    ray.get(engine.begin_update.remote(qwen3.version + 1), timeout=30)

    def block(actor) -> None:
        def wait(worker) -> None:
            time.sleep(8)

        actor.blocked = asyncio.run_coroutine_threadsafe(actor.llm.collective_rpc(wait), actor.llm.output_handler.get_loop())

    ray.get(engine.__ray_call__.remote(block), timeout=30)
    started = time.monotonic()
    ray.get(engine.abort_update.remote("given up"), timeout=30)
    assert 4 < time.monotonic() - started < 7.5
    for call in calls:
        assert isinstance(refusal(call), EngineNotReady)
    assert_heals(qwen3)


class TestCleanUp:
    """Without an engine: what is tried again, and until when."""

    @staticmethod
    def run(monkeypatch, errors: list, *, wanted=lambda: True, then: float = 0.2) -> tuple[int, list[float]]:
        """(steps taken, [seconds that run() took]); each step takes 0.02 s and raises the next of the errors, if any is left."""
        monkeypatch.setattr(clean_up, "WAIT_S", 0.05)
        monkeypatch.setattr(clean_up, "RETRY_S", 0.001)
        taken, left = [], list(errors)

        async def steps() -> None:
            taken.append(time.monotonic())
            await asyncio.sleep(0.02)
            if left:
                raise left.pop(0)

        async def main() -> float:
            started = time.monotonic()
            await clean_up.CleanUp().run("engine 0", steps, wanted)
            waited = time.monotonic() - started
            await asyncio.sleep(then)
            return waited

        return asyncio.run(main()), len(taken)

    def test_it_goes_on_in_the_background_until_the_workers_answer(self, monkeypatch, capfd):
        waited, taken = self.run(monkeypatch, [TimeoutError("no answer")] * 4)
        assert taken == 5 and 0.04 < waited < 0.1
        assert "engine 0: clean-up after a failed weight update: TimeoutError: no answer" in capfd.readouterr().out

    def test_a_dead_engine_ends_it(self, monkeypatch):
        assert self.run(monkeypatch, [EngineNotReady("its process died")] * 4)[1] == 1

    def test_a_new_learner_ends_it(self, monkeypatch):
        until = time.monotonic() + 0.05
        assert 1 <= self.run(monkeypatch, [TimeoutError()] * 100, wanted=lambda: time.monotonic() < until)[1] < 10


def test_a_late_failure_of_a_given_up_update_does_not_reach_into_the_next(qwen3):
    """A step of an old update that fails after a new learner has connected neither fails nor cleans up the new one."""
    qwen3.publish()

    def fail_late(actor):
        loop = actor.llm.output_handler.get_loop()
        return str(asyncio.run_coroutine_threadsafe(actor._fail("late", actor.session - 1), loop).exception(20))

    assert "late" in ray.get(qwen3.engines[0].__ray_call__.remote(fail_late), timeout=30)
    assert [state["state"] for state in qwen3.states()] == ["READY"] * 2
    assert (tiny.probe(qwen3.engines[0], TEXT) - qwen3.learner.log_probs(TEXT)).abs().max() < 1e-3


def test_the_prefix_cache_is_dropped_with_the_old_weights(qwen3):
    prompt = [3 + i % 250 for i in range(300)]  # several blocks
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for shift in (0.0, 0.5):
        with torch.no_grad():
            qwen3.learner.model.model.layers[0].input_layernorm.weight.add_(shift)
        qwen3.publish()
        outputs = [ray.get(qwen3.engines[0].generate.remote(prompt, params), timeout=60) for _ in range(2)]
        assert outputs[0].num_cached_tokens == 0
        assert outputs[1].num_cached_tokens >= 128
        for output in outputs:
            sampled = output.outputs[0]
            theirs = torch.tensor([step[t].logprob for step, t in zip(sampled.logprobs, sampled.token_ids, strict=True)])
            mine = qwen3.learner.log_probs([*prompt, *sampled.token_ids])[len(prompt) - 1 :]
            assert (theirs - mine).abs().max() < 1e-3


def test_both_engines_have_the_same_version_and_weights(qwen3):
    qwen3.publish()
    assert [(s["state"], s["version"]) for s in qwen3.states()] == [("READY", qwen3.version)] * 2
    assert torch.equal(tiny.probe(qwen3.engines[0], TEXT), tiny.probe(qwen3.engines[1], TEXT))
    assert {receipt["engine"] for receipt in qwen3.publisher.receipts} == {"engine 0", "engine 1"}


def test_an_engine_that_hangs_ends_the_publish_at_its_deadline(qwen3):
    qwen3.publish()
    qwen3.publisher.close()
    impatient = Publisher(qwen3.engines, bucket_mb=0.1, timeout_s=5)
    pid = tiny.process_id(qwen3.engines[1])

    def tensors():
        for i, pair in enumerate(qwen3.learner.tensors().items()):
            if i == 20:
                os.kill(pid, signal.SIGSTOP)
            yield pair

    started = time.monotonic()
    try:
        with pytest.raises(SyncError, match="no answer from .*engine 1"):
            impatient.publish(tensors(), qwen3.version + 1)
        assert time.monotonic() - started < 5 + 12
        assert qwen3.states()[0]["state"] == "FAILED"
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(5)  # the stopped engine finds its group timed out
    assert_heals(qwen3)


@pytest.mark.parametrize("moment", [pytest.param("between buckets", marks=pytest.mark.slow), "in a bucket"])
def test_a_learner_that_dies_leaves_no_half_updated_engine_sampling(qwen3, moment):
    """Its engines refuse to generate after their time-out at the latest, and the next learner takes them over."""
    qwen3.publish()
    qwen3.publisher.close()
    tensors = list(qwen3.learner.tensors().items())

    @ray.remote(num_cpus=0)
    class DoomedLearner:
        def publish(self, engines, version):
            def some():
                yield from tensors[:20]
                if moment == "between buckets":
                    time.sleep(1000)
                gloo.Sender.send = lambda self, flat: time.sleep(1000)  # engines wait for bytes
                yield from tensors[20:]

            Publisher(engines, bucket_mb=0.02, timeout_s=6).publish(some(), version)

    doomed = DoomedLearner.remote()
    doomed.publish.remote(qwen3.engines, qwen3.version + 1)
    until = time.monotonic() + 150  # a Ray worker has to start
    while (states := [state["state"] for state in qwen3.states()]) != ["UPDATING"] * 2:
        assert time.monotonic() < until, states
        time.sleep(0.05)
    time.sleep(1)
    ray.kill(doomed)
    started = time.monotonic()
    for engine in qwen3.engines:
        assert isinstance(refusal(engine.generate.remote([5, 6], SamplingParams(max_tokens=2))), EngineNotReady)
    assert time.monotonic() - started < 25
    qwen3.publisher = Publisher(qwen3.engines, bucket_mb=0.1, timeout_s=40, verify="readback")
    assert_heals(qwen3)


def test_a_worker_process_that_dies_ends_the_publish(qwen2):
    qwen2.publish()
    process = psutil.Process(tiny.process_id(qwen2.engines[0]))

    def tensors():
        for i, pair in enumerate(qwen2.learner.tensors().items()):
            if i == 20:
                process.kill()
            yield pair

    started = time.monotonic()
    with pytest.raises(SyncError, match="engine 0"):
        qwen2.publish(tensors())
    assert time.monotonic() - started < 35  # it need not wait for its 60 s
    assert qwen2.states()[0]["state"] == "FAILED"
    with pytest.raises(SyncError, match="engine 0"):
        qwen2.publish()


def test_an_actor_that_dies_ends_the_publish_and_the_others_can_go_on(qwen3):
    qwen3.publish()
    core = psutil.Process(tiny.process_id(qwen3.engines[1]))

    def tensors():
        for i, pair in enumerate(qwen3.learner.tensors().items()):
            if i == 20:
                ray.kill(qwen3.engines[1])
            yield pair

    started = time.monotonic()
    with pytest.raises(SyncError, match="engine 1: the engine is dead"):
        qwen3.publish(tensors())
    assert time.monotonic() - started < 35  # it need not wait for its 60 s
    assert ray.get(qwen3.engines[0].weights_state.remote(), timeout=30)["state"] == "FAILED"
    core.wait(20)  # TimeoutExpired if the process with the model outlives its actor
    started = time.monotonic()
    with pytest.raises(SyncError, match="engine 1: the engine is dead"):
        qwen3.publish()
    assert time.monotonic() - started < 35  # it need not wait for its 60 s
    # A new group without the dead engine.
    rest = Publisher(qwen3.engines[:1], bucket_mb=0.1, timeout_s=40)
    rest.publish(iter(qwen3.learner.tensors().items()), qwen3.version + 1)
    assert (tiny.probe(qwen3.engines[0], TEXT) - qwen3.learner.log_probs(TEXT)).abs().max() < 1e-3
