"""Small models on a card: a learner in this process and vLLM engines beside it."""

import time

import ray
import torch
from vllm import SamplingParams

from qarl_openrlhf.export.write import export_checkpoint
from qarl_openrlhf.sync.publisher import Publisher
from tests.engine import tiny

SHAPE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=320)
ENGINE = dict(
    max_model_len=512,
    max_num_seqs=16,
    seed=0,
    gpu_memory_utilization=0.1,
    kv_cache_memory_bytes=2**28,
    enforce_eager=False,
    enable_prefix_caching=False,
    compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
)
PROMPTS = [[5 + i, 6, 7, 8 + i] for i in range(8)]


def make_learner(kind: str, scheme: str, directory, **shape) -> tiny.Learner:
    learner = tiny.make_learner(kind, scheme, directory, dtype=torch.bfloat16, **{**SHAPE, **shape})
    learner.model.cuda()
    return learner


def start(learner: tiny.Learner, **kwargs):
    """Our engine for the learner, sharing a GPU with whatever else is there."""
    gpus = kwargs.pop("ray_gpus", 0.1)
    return tiny.start_engine(learner, device="cuda", ray_gpus=gpus, **{**ENGINE, **kwargs})


class Bench:
    def __init__(self, learner, engines, transport: str, device: str = "cuda:0", **publisher):
        self.learner, self.engines, self.version = learner, engines, 0
        options = {"bucket_mb": 0.5, "timeout_s": 60, **publisher}
        options = {"device": torch.device(device), **options}
        self.publisher = Publisher(engines, transport=transport, **options)

    def publish(self, tensors=None) -> dict:
        self.version += 1
        return self.publisher.publish(iter(tensors or self.learner.tensors().items()), self.version)

    def train_step(self, seed: int) -> None:
        """Move every parameter, as an optimizer would."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.learner.model.parameters():
                parameter.add_((torch.randn_like(parameter) * 0.02).to(torch.bfloat16))
        self.learner.model.quant_cache.invalidate()


SAMPLE = SamplingParams(temperature=1.0, max_tokens=24, seed=3, ignore_eos=True, logprobs=0)


def sample(engine) -> tuple[list, torch.Tensor]:
    """Tokens and log-probs of eight responses, reproducible but for which of them share a step."""
    return read(ray.get([engine.generate.remote(prompt, SAMPLE) for prompt in PROMPTS], timeout=120))


def together(engine) -> tuple[list, torch.Tensor]:
    """Tokens and log-probs of eight responses that begin in the same step, as those of one call of ``LLM.generate``."""
    ray.get(engine.pause_generation.remote(), timeout=30)
    calls = [engine.generate.remote(prompt, SAMPLE) for prompt in PROMPTS]
    until = time.monotonic() + 10
    while ray.get(engine.get_num_unfinished_requests.remote(), timeout=30) < len(calls):
        assert time.monotonic() < until, "requests do not get to a paused engine"
        time.sleep(0.05)
    ray.get(engine.resume_generation.remote(), timeout=30)
    return read(ray.get(calls, timeout=120))


def read(outputs) -> tuple[list, torch.Tensor]:
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    log_probs = [[step[t].logprob for step, t in zip(o.outputs[0].logprobs, ids)] for o, ids in zip(outputs, tokens)]
    return tokens, torch.tensor(log_probs)


@ray.remote(num_gpus=0.1, num_cpus=0)
def sample_from_export(directory: str, **kwargs) -> tuple[list, torch.Tensor]:
    """The same responses from vLLM as a user starts it on an exported checkpoint: nothing of ours but the plugin, which it finds itself."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(model=directory, dtype="bfloat16", logprobs_mode="processed_logprobs", **{**ENGINE, **kwargs})
    return read(llm.generate([{"prompt_token_ids": p} for p in PROMPTS], SAMPLE, use_tqdm=False))


def export(learner: tiny.Learner, directory) -> str:
    export_checkpoint(learner.model, learner.model.config, str(directory), learner.scheme, tokenizer=tiny.tokenizer())
    return str(directory)
