"""vLLM's modes under published weights, bit-equal with fresh engines: several engines, sleep, prefix caching; torch.compile.

All engines of this file start at once, the fresh ones too: what they load is exported before anything is published.
"""

import os

import pytest
import ray
import torch
from vllm import SamplingParams

from . import engines

# No process finds what another one is still compiling.
os.environ.setdefault("VLLM_DISABLE_COMPILE_CACHE", "1")

COMPILED = {"mode": 3, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
# what engine/config.py adds for 8-bit floating-point activations; a fresh vLLM is told so by its user
FP8 = {"custom_ops": ["+quant_fp8"], "pass_config": {"fuse_norm_quant": False}}
LONG = [3 + i % 250 for i in range(300)]  # several blocks of a prefix cache
MODES = {
    "plain": {},
    "sleeping": {"enable_sleep_mode": True, "kv_cache_memory_bytes": 2**30},
    "caching": {"enable_prefix_caching": True},
    "compiled": {"compilation_config": COMPILED},
}


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=3, ignore_eos=True, logprobs=0)


@ray.remote(num_gpus=0.1, num_cpus=0)
def fresh(directory: str, settings: dict) -> dict:
    """vLLM as a user starts it on an exported checkpoint: ``sample`` of all prompts together, ``long`` prompt twice."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(model=directory, dtype="bfloat16", logprobs_mode="processed_logprobs", **{**engines.ENGINE, **settings})

    def ask(prompts: list, max_tokens: int) -> list:
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params(max_tokens), use_tqdm=False)

    sampled = engines.read(ask(engines.PROMPTS, 24))
    long = [ask([LONG], 8) for _ in range(2)]
    return {"sample": sampled, "long": [(engines.read(o), o[0].num_cached_tokens) for o in long]}


def assert_equal(mine: tuple, theirs: tuple) -> None:
    assert mine[0] == theirs[0]
    assert torch.equal(mine[1], theirs[1]), f"log-probs differ by up to {float((mine[1] - theirs[1]).abs().max())}"


class Modes:
    """Learners, their engines by mode, what fresh engines of their final weights sample, and a publisher for each learner."""

    def __init__(self, directory):
        self.w4a16 = engines.make_learner("qwen3", "w4a16", directory / "w4a16")
        self.fp8 = engines.make_learner("qwen3", "fp8", directory / "fp8")
        exports = {name: self.export_final(learner, directory) for name, learner in (("w4a16", self.w4a16), ("fp8", self.fp8))}
        self.engines = {mode: engines.start(self.w4a16, **settings) for mode, settings in MODES.items()}
        self.engines["compiled fp8"] = engines.start(self.fp8, compilation_config=COMPILED)
        fresh_ones = {
            "plain": fresh.remote(exports["w4a16"], {"enable_prefix_caching": True}),
            "compiled": fresh.remote(exports["w4a16"], {"compilation_config": COMPILED}),
            "compiled fp8": fresh.remote(exports["fp8"], {"compilation_config": COMPILED | FP8}),
        }
        engines.tiny.ready(*self.engines.values())
        self.benches = [
            engines.Bench(self.w4a16, [self.engines[mode] for mode in MODES], "ipc"),
            engines.Bench(self.fp8, [self.engines["compiled fp8"]], "ipc"),
        ]
        for bench in self.benches:
            metrics = bench.publish()
            assert metrics["sync/checksum_ok"] == 1.0
        self.before = {mode: engines.together(engine) for mode, engine in self.engines.items()}
        self.long_before = self.ask_long("caching")
        for bench in self.benches:
            bench.train_step(1)
            bench.publish()
        self.fresh = {mode: ray.get(result, timeout=300) for mode, result in fresh_ones.items()}

    @staticmethod
    def export_final(learner, directory) -> str:
        """The checkpoint that the learner's first step will give; the learner stays where it is."""
        state = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
        ahead = engines.Bench(learner, [], "ipc")
        ahead.train_step(1)
        path = engines.export(learner, directory / f"{learner.scheme.name}-final")
        learner.model.load_state_dict(state)
        learner.model.quant_cache.invalidate()
        return path

    def ask_long(self, mode: str):
        return ray.get(self.engines[mode].generate.remote(LONG, params(8)), timeout=60)


@pytest.fixture(scope="module")
def modes(cluster, tmp_path_factory):
    return Modes(tmp_path_factory.mktemp("modes"))


def test_one_publish_feeds_all_engines(modes):
    """Four engines on one card: the same tokens and log-probs before and after a step, and those of a fresh engine."""
    for mode in ("sleeping", "caching"):
        assert_equal(modes.before[mode], modes.before["plain"])
    for mode in ("plain", "sleeping", "caching"):
        after = engines.together(modes.engines[mode])
        assert after[0] != modes.before[mode][0]
        assert_equal(after, modes.fresh["plain"]["sample"])


@pytest.mark.parametrize("mode", ["compiled", "compiled fp8"])
def test_torch_compile(modes, mode):
    """vLLM compiles with the dummy weights it starts with; what it compiled computes with the published ones.

    Inductor chooses kernels by timing them, so two processes may round otherwise (log-probs 0.0014 apart were seen): bit for bit
    is asked of one engine that is given the same weights again after others.
    """
    engine, bench = modes.engines[mode], modes.benches["fp8" in mode]
    after = engines.together(engine)
    assert after[0] != modes.before[mode][0]
    tokens, log_probs = modes.fresh[mode]["sample"]
    assert after[0] == tokens
    assert (after[1] - log_probs).abs().max() < 0.01
    state = {name: tensor.clone() for name, tensor in bench.learner.model.state_dict().items()}
    bench.train_step(5)
    bench.publish()
    assert engines.together(engine)[0] != after[0]
    bench.learner.model.load_state_dict(state)
    bench.learner.model.quant_cache.invalidate()
    bench.publish()
    assert_equal(engines.together(engine), after)
    text = list(range(3, 200))
    gap = float((bench.learner.log_probs(text).cpu() - engines.tiny.probe(engine, text)).abs().mean())
    print(f"{mode}: mean |delta logp| to the learner {gap:.4f}")
    assert gap < (0.25 if "fp8" in mode else 0.06)  # test_parity's limits


def test_a_push_drops_the_prefix_cache(modes):
    """Keys and values of the old weights are not used: prompt and response are those of a fresh engine, cached or not."""
    assert modes.ask_long("caching").num_cached_tokens == 0 == modes.long_before.num_cached_tokens
    modes.benches[0].publish()
    outputs = [modes.ask_long("caching") for _ in range(2)]
    for output, (sampled, cached) in zip(outputs, modes.fresh["plain"]["long"], strict=True):
        assert output.num_cached_tokens == cached
        assert_equal(engines.read([output]), sampled)
    assert outputs[0].num_cached_tokens == 0 and outputs[1].num_cached_tokens >= 256


def asleep(engine) -> list[bool]:
    """Of each allocation of the engine's sleep-mode allocator (weights, KV cache): whether its memory is given back."""

    def look(worker):
        from vllm.device_allocator import get_mem_allocator_instance

        return [data.is_asleep for data in get_mem_allocator_instance().pointer_to_data.values()]

    return engines.tiny.on_workers(engine, look)[0]


def test_sleep_and_wake(modes):
    """Weights published between waking the weights and waking the KV cache: graphs decode as before the sleep."""
    engine, bench = modes.engines["sleeping"], modes.benches[0]
    before = engines.together(engine)
    for seed in (None, 7):
        if seed is not None:
            bench.train_step(seed)
        ray.get(engine.sleep.remote(), timeout=60)
        assert asleep(engine) and all(asleep(engine))
        ray.get(engine.wake_up.remote(tags=["weights"]), timeout=60)
        assert any(asleep(engine)) and not all(asleep(engine))
        bench.publish()
        ray.get(engine.wake_up.remote(tags=["kv_cache"]), timeout=60)
        assert not any(asleep(engine))
        after = engines.together(engine)
        if seed is None:
            assert_equal(after, before)
        assert_equal(after, engines.together(modes.engines["plain"]))
    assert after[0] != before[0]
