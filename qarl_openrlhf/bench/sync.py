"""A learner and a vLLM engine of a real model's shape, and what a push between them costs.

The learner's master weights are random, and the same in every run. A dense model is built whole; of a mixture of experts
(``repeated``: of any model) one decoder layer is made and quantized anew under every layer's name: master weights need not lie in
memory to measure a push. A learner of several ranks: :mod:`qarl_openrlhf.bench.sync_ranks`.
"""

import hashlib
import os
import time
from collections.abc import Iterator

import ray
import torch
from torch import Tensor

from qarl_openrlhf.runtime import free_port
from qarl_openrlhf.sync.checksum import checksum

SEED = 0  # of the master weights: however many ranks share them, what is published is the same

_COMMON = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    torch_dtype="bfloat16",
    vocab_size=151936,
    head_dim=128,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    attention_bias=False,
    bos_token_id=151643,
    eos_token_id=151645,
)


def _dense(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers)
    return {**_COMMON, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


SHAPES = {
    "tiny": _dense(512, 1024, 4, 8, 4, vocab_size=4096, head_dim=64, bos_token_id=0, eos_token_id=1),
    "1.5b": _dense(1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "7b": _dense(3584, 18944, 28, 28, 4),
    "8b": _dense(4096, 12288, 36, 32, 8),
    "30b-a3b": _dense(
        2048, 6144, 48, 32, 4,
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip
_MOE = ("architectures", "model_type", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
SHAPES["tiny-moe"] = SHAPES["tiny"] | {name: SHAPES["30b-a3b"][name] for name in _MOE}
SHAPES["tiny-moe"] |= {"num_experts": 16, "moe_intermediate_size": 128}


def config_of(shape: str, layers: int | None):
    """Hugging Face config of a shape, optionally with fewer layers."""
    from transformers import AutoConfig

    fields = dict(SHAPES[shape])
    if layers:
        fields["num_hidden_layers"] = layers
    return AutoConfig.for_model(**fields)


def masters_of(model_class, config, device) -> torch.nn.Module:
    """A model with random BF16 weights on the device, always the same ones."""
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16)
    model.to_empty(device=device)
    model.tie_weights()
    torch.manual_seed(SEED)
    for parameter in model.parameters():
        fill(parameter)
    return model


@torch.no_grad()
def fill(parameter: Tensor) -> None:
    parameter.normal_(0, 0.02)


class Fingerprint:
    """One number for all tensors that pass through ``watch``: names, dtypes, shapes and bytes, in their order."""

    def __init__(self):
        self._hash = hashlib.sha256()

    def watch(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._hash.update(f"{name} {tensor.dtype} {list(tensor.shape)} {checksum(tensor)}\n".encode())
            yield name, tensor

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]


class Learner:
    """The learner's process (a Ray actor): master weights, quantizer, publisher."""

    gather = None  # what published_tensors takes, where the weights are partitioned

    def __init__(
        self, shape: str, layers: int | None, scheme: str, gpu: int = 0, *, device: str = "cuda", repeated: bool | None = None
    ):
        from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

        from qarl_openrlhf.quant.convert import convert_model
        from qarl_openrlhf.quant.scheme import QuantScheme

        self.on_card = device == "cuda"
        self.device = torch.device("cuda", gpu) if self.on_card else torch.device("cpu")
        if self.on_card:
            torch.cuda.set_device(self.device)
        self.config = config_of(shape, layers)
        self.layers = self.config.num_hidden_layers
        experts = self.config.model_type == "qwen3_moe"
        self.repeated = experts if repeated is None else repeated
        if self.repeated:
            self.config.num_hidden_layers = 1
        model_class = Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM
        self.model = self._masters(model_class)
        self.scheme = QuantScheme.parse(scheme)
        convert_model(self.model, self.scheme)
        self.version = 0
        self.publisher = None

    def _masters(self, model_class) -> torch.nn.Module:
        return masters_of(model_class, self.config, self.device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published, quantized (and gathered) on the way."""
        from qarl_openrlhf.quant.convert import published_tensors

        cache = self.model.quant_cache
        cache.invalidate()
        for layer, names in self.parts():
            if layer:
                cache.invalidate()  # quantize again, as for another layer
            for name, tensor in published_tensors(self.model, self.scheme, gather=self.gather, only=names):
                yield name.replace(".layers.0.", f".layers.{layer}.") if self.repeated else name, tensor
        cache.require_finite()

    def parts(self) -> Iterator[tuple[int, list[str]]]:
        """(layer, parameter names): the whole model's parameters in its order, of a repeated layer once for every layer."""
        names = [name for name, _ in self.model.named_parameters()]
        if not self.repeated:
            yield 0, names
            return
        inside = [i for i, name in enumerate(names) if ".layers.0." in name]
        for layer in range(self.layers):
            first = 0 if layer == 0 else inside[0]  # embeddings before the first layer, norm and head after the last
            yield layer, names[first : len(names) if layer == self.layers - 1 else inside[-1] + 1]

    def connect(self, engines: list, transport: str, bucket_mb: int, verify: str) -> None:
        from qarl_openrlhf.sync.publisher import Publisher

        self.publisher = Publisher(
            engines, transport=transport, device=self.device, bucket_mb=bucket_mb, timeout_s=120, verify=verify
        )

    def push(self, fingerprint: bool = False) -> dict:
        """One publish, from weights that have just changed to engines that may sample; ``fingerprint`` costs time in it."""
        self.version += 1
        before = 0
        if self.on_card:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        mark = Fingerprint()
        started = time.perf_counter()
        metrics = self.publisher.publish(mark.watch(self.tensors()) if fingerprint else self.tensors(), self.version)
        metrics["total_ms"] = (time.perf_counter() - started) * 1e3
        if fingerprint:
            metrics["published"] = str(mark)
        if self.on_card:
            metrics["learner_peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            metrics["learner_allocated_mb"] = torch.cuda.memory_allocated() / 2**20
        return metrics

    def quantize_only(self) -> float:
        """ms to quantize (and gather) everything that is published, nothing sent."""
        self._wait()
        started = time.perf_counter()
        for _ in self.tensors():
            pass
        self._wait()
        return (time.perf_counter() - started) * 1e3

    def _wait(self) -> None:
        if self.on_card:
            torch.cuda.synchronize()

    def join_openrlhf(self, engines: list) -> None:
        """OpenRLHF's own transfer group: a broadcast a parameter."""
        from openrlhf.utils.distributed_util import stateless_init_process_group

        address = ray.util.get_node_ip_address()
        port = free_port()
        world = len(engines) + 1
        calls = [
            engine.init_process_group.remote(address, port, i + 1, world, "openrlhf", backend="nccl", use_ray=False)
            for i, engine in enumerate(engines)
        ]
        self.group = stateless_init_process_group(address, port, 0, world, self.device)
        ray.get(calls)

    def push_openrlhf(self, engines: list, transport: str = "nccl") -> float:
        """ms of OpenRLHF 0.11.2's ``broadcast_to_vllm``: one RPC, one broadcast (or handle) and one wait a parameter."""
        send = {"nccl": self._broadcast_parameter, "ipc": self._hand_over_parameter}[transport]
        torch.cuda.synchronize()
        started = time.perf_counter()
        parameters = list(self.model.named_parameters())
        for i, (name, parameter) in enumerate(parameters, start=1):
            send(engines, name, parameter.data, {"empty_cache": i == len(parameters)})
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    def _broadcast_parameter(self, engines: list, name: str, data: Tensor, options: dict) -> None:
        calls = [engine.update_weight.remote(name, dtype=data.dtype, shape=data.shape, **options) for engine in engines]
        self.group.broadcast(data, src=0, stream=torch.cuda.current_stream())
        ray.get(calls)

    def _hand_over_parameter(self, engines: list, name: str, data: Tensor, options: dict) -> None:
        from openrlhf.trainer.ray.utils import get_physical_gpu_id
        from torch.multiprocessing.reductions import reduce_tensor

        copy = data.clone()
        options = options | {"dtype": data.dtype, "shape": data.shape, "ipc_handles": {get_physical_gpu_id(): reduce_tensor(copy)}}
        ray.get([engine.update_weight_cuda_ipc.remote(name, **options) for engine in engines])
        torch.cuda.synchronize()  # OpenRLHF's barrier after each parameter; a world of one has nobody else to wait for


ENGINE = dict(
    dtype="bfloat16",
    load_format="dummy",
    skip_tokenizer_init=True,
    max_model_len=1024,
    max_num_seqs=64,
    seed=0,
    enforce_eager=False,
    enable_prefix_caching=False,
    gpu_memory_utilization=0.3,  # only what must be free at start: the next line is what is taken
    kv_cache_memory_bytes=4 * 2**30,
    compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [64]},
)


# What the CPU engine does not know: CUDA graphs, and a KV cache sized in its own environment variable.
_CARD_ONLY = ("gpu_memory_utilization", "kv_cache_memory_bytes", "compilation_config", "enforce_eager")


def start_engine(directory: str, scheme: str, *, gpus: float, tp: int = 1, device: str = "cuda", **kwargs):
    """Our engine."""
    from qarl_openrlhf.engine.actor import QarlRolloutActor

    # Ray's own default for actors with async methods, as in a training run: as many requests as vLLM takes.
    actor = ray.remote(QarlRolloutActor).options(num_cpus=0, num_gpus=gpus, max_concurrency=1000)
    options = {**ENGINE, "tensor_parallel_size": tp, "num_gpus": gpus, **kwargs}
    if device == "cpu":
        options = {name: value for name, value in options.items() if name not in _CARD_ONLY}
    elif tp > 1:
        options["distributed_executor_backend"] = "mp"
    return actor.remote(model=directory, qarl_scheme=scheme, qarl_device=device, **options)


def start_openrlhf_engine(directory: str, *, gpus: float):
    """OpenRLHF's engine with its own weight transfer; ``gpus``: 1, or a share of the learner's."""
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    options = {"worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap", "num_gpus": gpus, **ENGINE}
    return RolloutRayActor.options(num_cpus=0, num_gpus=gpus).remote(model=directory, **options)


def decode_ms(engine, steps: int = 128) -> float:
    """ms a decode step of 64 sequences."""
    from vllm import SamplingParams

    def seconds(tokens: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        ray.get([engine.generate.remote([100 + i] * 16, params) for i in range(64)], timeout=300)
        return time.perf_counter() - started

    seconds(4)
    short, long = min(seconds(4) for _ in range(2)), min(seconds(4 + steps) for _ in range(2))
    return (long - short) / steps * 1e3


def write_config(directory: str, shape: str, layers: int | None) -> str:
    os.makedirs(directory, exist_ok=True)
    config_of(shape, layers).save_pretrained(directory)
    return directory
