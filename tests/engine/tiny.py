"""Tiny random models, learner and engine side by side."""

import asyncio
from dataclasses import dataclass

import ray
import torch

from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from qarl_openrlhf.quant.linear import quantized_forward
from tests.tiny_models import byte_tokenizer as tokenizer
from tests.tiny_models import random_model

SHAPE = dict(
    vocab_size=300,  # not a multiple of 64: vLLM pads it
    hidden_size=128,
    intermediate_size=192,
    head_dim=32,
    max_position_embeddings=512,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=2,
)
TIED = ("qwen2",)  # qwen2 has biases in its attention, too; qwen3 norms of q and k


@dataclass
class Learner:
    """A converted model in memory and the directory its BF16 checkpoint lies in."""

    model: torch.nn.Module
    scheme: QuantScheme
    directory: str

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(published_tensors(self.model, self.scheme))

    def log_probs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """float32 [len(ids) - 1] of the quantized forward."""
        row = torch.tensor([ids], device=self.model.device)
        with torch.no_grad(), quantized_forward(self.model):
            logits = self.model(row).logits[0, :-1].float() / temperature
        return torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None])[:, 0]


def make_learner(kind: str, scheme: str, directory, *, dtype=torch.float32, seed: int = 0, **shape) -> Learner:
    """A random model of ``kind``, saved to ``directory``, every parameter (norms and biases, too) away from its default."""

    def spread(name: str, parameter) -> None:
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.1))
        # BF16 values in any dtype: a float32 engine then has exactly the tensors of a BF16 one.
        parameter.copy_(parameter.to(torch.bfloat16))

    model = random_model(kind, spread, seed=seed, dtype=dtype, **SHAPE | {"tie_word_embeddings": kind in TIED} | shape).eval()
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    parsed = QuantScheme.parse(scheme)
    convert_model(model, parsed)
    return Learner(model, parsed, str(directory))


def start_engine(learner: Learner, *, tp: int = 1, device: str = "cpu", ray_gpus: float = 0, **kwargs):
    """Actor handle of an engine for the learner's model and scheme; starting up takes seconds, use ``ready``."""
    from qarl_openrlhf.engine.actor import QarlRolloutActor

    actor = ray.remote(QarlRolloutActor).options(num_cpus=0, num_gpus=ray_gpus, max_concurrency=64)
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[learner.model.dtype]
    usual = {"qarl_scheme": str(learner.scheme), "dtype": dtype, "seed": 0, "num_gpus": 0}
    usual |= {"max_model_len": 400, "max_num_seqs": 16}
    return actor.remote(
        model=learner.directory,
        qarl_device=device,
        tensor_parallel_size=tp,
        **(usual | kwargs),
    )


def ready(*engines) -> None:
    """Wait until the engines have started."""
    ray.get([engine.weights_state.remote() for engine in engines], timeout=240)


def probe(engine, ids: list[int]) -> torch.Tensor:
    return torch.tensor(ray.get(engine.probe_logprobs.remote([ids]), timeout=60)[0])


def process_id(engine) -> int:
    """Of the process that runs the engine's model (vLLM's EngineCore), as vLLM knows it."""

    def core(actor) -> int:
        [process] = actor.llm.engine_core.resources.engine_manager.processes
        return process.pid

    return ray.get(engine.__ray_call__.remote(core), timeout=30)


def on_workers(engine, function) -> list:
    """``function(worker)`` on every rank of an engine; not a module-level function, so that it travels by value."""

    def call(actor):
        loop = actor.llm.output_handler.get_loop()
        return asyncio.run_coroutine_threadsafe(actor.llm.collective_rpc(function), loop).result(30)

    return ray.get(engine.__ray_call__.remote(call), timeout=40)
