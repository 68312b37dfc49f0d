"""One Ray head and three engines for all tests of this directory: an engine takes seconds to start.

``qwen3`` has two engines (w4a16, untied lm_head, q/k norms), ``qwen2`` one (w8a8, tied embeddings, attention biases, a stop
string); all run in float32, where learner and engine must agree to rounding.
"""

import pytest
import ray
import torch
from vllm import SamplingParams

from qarl_openrlhf import runtime
from qarl_openrlhf.sync.publisher import Publisher

from . import tiny


class Bench:
    """A learner, its engines and a publisher between them."""

    def __init__(self, learner: tiny.Learner, engines: list, **publisher):
        self.learner, self.engines = learner, engines
        # Small buckets: every publish takes several, so that a late error finds earlier buckets applied.
        self.publisher = Publisher(engines, **{"bucket_mb": 0.1, "timeout_s": 60, "verify": "readback", **publisher})
        self.version = 0
        self.refusals = [refusal(call) for engine in engines for call in sampling_calls(engine)]

    def publish(self, tensors=None) -> dict:
        """Publish the learner's tensors (or other (name, tensor) pairs) as the next version."""
        self.version += 1
        return self.publisher.publish(iter(tensors or self.learner.tensors().items()), self.version)

    def states(self) -> list[dict]:
        return ray.get([engine.weights_state.remote() for engine in self.engines], timeout=30)


def sampling_calls(engine) -> list:
    params = SamplingParams(max_tokens=2)
    responses = engine.generate_responses.remote("ab", "", params, 32, tiny.tokenizer())
    return [engine.generate.remote([5, 6], params), responses, engine.probe_logprobs.remote([[5, 6]])]


def refusal(call) -> Exception | None:
    """The error of a call, or None if it succeeded."""
    try:
        ray.get(call, timeout=60)
    except Exception as error:
        return error
    return None


@pytest.fixture(scope="package")
def cluster():
    torch.set_num_threads(1)
    environment = runtime.set_environment("cpu", threads=1)
    runtime.start_ray("cpu", runtime.ResourcePlan({"engines": 4}), environment, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="package")
def benches(cluster, tmp_path_factory):
    qwen3 = tiny.make_learner("qwen3", "w4a16:g64", tmp_path_factory.mktemp("qwen3"))
    qwen2 = tiny.make_learner("qwen2", "w8a8", tmp_path_factory.mktemp("qwen2"), initializer_range=0.05)
    engines = [tiny.start_engine(qwen3), tiny.start_engine(qwen3), tiny.start_engine(qwen2, qarl_stop=["e"])]
    tiny.ready(*engines)
    return {"qwen3": Bench(qwen3, engines[:2]), "qwen2": Bench(qwen2, engines[2:])}


@pytest.fixture
def qwen3(benches):
    return benches["qwen3"]


@pytest.fixture
def qwen2(benches):
    return benches["qwen2"]


@pytest.fixture(params=["qwen3", "qwen2"])
def bench(request, benches):
    return benches[request.param]
