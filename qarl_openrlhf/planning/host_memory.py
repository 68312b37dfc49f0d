"""Main memory of a run on a CPU: learner, engines and the rest share one machine, and the kernel kills whoever asks last.

Weights, optimizer state, copies and caches are counted; what a Python process with PyTorch or vLLM takes beside them is
measured (proportional set sizes at one learner and one engine; tests/planning/test_host_memory.py has the runs).
"""

import os
from dataclasses import dataclass

from qarl_openrlhf.kernels.product import cpu_multiplies_bf16
from qarl_openrlhf.optim.exchange import peak_bytes
from qarl_openrlhf.planning.learner_memory import as_critic, micro_batch_tokens
from qarl_openrlhf.planning.machine import machine_bytes
from qarl_openrlhf.planning.memory import SAMPLED
from qarl_openrlhf.planning.model_shape import ModelShape, kv_bytes_per_token, layer_activations, packed_bytes
from qarl_openrlhf.planning.offload import data_parallel
from qarl_openrlhf.planning.parts import GIB, gib
from qarl_openrlhf.quant.scheme import QuantScheme

REST = int(1.6 * GIB)  # driver, controller, Ray's own processes
PROCESS = int(0.55 * GIB)  # a worker with PyTorch, DeepSpeed and transformers imported
ENGINE = int(1.1 * GIB)  # an engine's actor and vLLM's EngineCore
WARM_UP = 256  # sequences with which vLLM warms its sampler up
LOGITS = 12  # bytes a token and word: float32 logits, their gradient and the log-softmax
KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class HostPart:
    """One part of the machine's memory; ``advice``: the flag that lowers it, empty if none does."""

    name: str
    bytes: int
    advice: str = ""


def host_parts(args, shape: ModelShape, critic: ModelShape | None = None) -> list[HostPart]:
    """What a run with ``--device cpu`` holds at its fullest moment, the optimizer step, over all its processes.

    critic: its model's shape, of a run that has one.
    """
    scheme, stage, p = QuantScheme.parse(args.quant.scheme), args.ds.zero_stage, shape.parameters
    ranks = data_parallel(args)
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    copy = 2 if cpu_multiplies_bf16() else 4  # bytes of a weight in the copy that products read
    whole = 1 if stage == 3 else ranks  # learners that hold all parameters
    parts = [
        HostPart("Ray, driver, controller", REST),
        HostPart("learner processes", ranks * PROCESS, "a smaller --actor.num_gpus_per_node" if ranks > 1 else ""),
        HostPart("BF16 parameters", 2 * p * whole, "--ds.zero_stage 3" if whole > 1 else ""),
        HostPart("optimizer state, gradients", _states(args, shape), "" if stage else "--ds.zero_stage 2"),
        HostPart("whole matrices (Muon)", _matrices(args, shape, copy)),
    ]
    if args.train.enable_ema:  # a BF16 model a learner, and one float32 copy over all of them
        parts.append(HostPart("moving average", 2 * p * whole + 4 * p, "no --train.enable_ema"))
    codes = 4 if scheme.activation_format == "int8" else 0  # of a weight in float32, for the product of 8-bit activations
    cache = packed_bytes(scheme) + (copy + codes if args.quant.cache == "dequant" else 0)
    if scheme.quantized and args.quant.cache != "none":
        less = {"dequant": "--quant.cache packed", "packed": "--quant.cache none"}[args.quant.cache]
        parts.append(HostPart(f"quantization cache ({args.quant.cache})", int(shape.quantized * cache) * ranks, less))
    tokens = micro_batch_tokens(args) * ranks
    shorter = "a smaller --train.micro_batch_size or --data.max_len"
    if args.train.dynamic_batch_enable:
        shorter = "a smaller --train.max_tokens_per_gpu"
    kept = _kept(args, shape, tokens)
    chunk = args.actor.logprob_chunk * ranks
    logits = LOGITS * (min(chunk, tokens) if chunk else tokens) * shape.vocabulary
    if chunk:  # lm_head's gradient, summed in float32, beside a chunk's
        logits += 6 * shape.vocabulary * shape.hidden * ranks
    parts.append(HostPart("activations, logits", kept + logits, shorter))
    published = int(shape.quantized * packed_bytes(scheme)) + 2 * (p - shape.quantized)
    bucket = max(int(args.sync.bucket_mb * 2**20), 2 * shape.largest_other)
    parts.append(HostPart("push", min(published, 2 * bucket) + engines * min(published, bucket), "a smaller --sync.bucket_mb"))
    if scheme.quantized:  # metrics.changed_codes of rank 0: those of the last push and of the first
        parts.append(HostPart("codes of earlier pushes", 2 * shape.quantized // (2 if scheme.weight_format == "int4" else 1)))
    others = [args.algo.kl.init_coef > 0, not args.reward.remote_url]
    if any(others):
        parts.append(HostPart("reference, reward model (of the policy's size)", sum(others) * (PROCESS + 2 * p)))
    if critic:
        parts.append(HostPart("critic", _critic(as_critic(args), critic, copy), shorter))
    fewer = "a smaller --vllm.num_engines" if args.vllm.num_engines > 1 else ""
    # What an engine's products read, beside the weights that are pushed: engine.cpu_method, one copy over the ranks of TP.
    operands = shape.quantized * (codes or copy) if scheme.quantized else (copy == 4) * copy * shape.matrices
    lm_head = (copy == 4) * copy * shape.vocabulary * shape.hidden
    weights = published + operands + lm_head
    parts += [
        HostPart("engine processes", engines * (ENGINE + WARM_UP * SAMPLED * shape.vocabulary), fewer),
        HostPart("engine weights", args.vllm.num_engines * weights, fewer),
        HostPart("KV cache", engines * kv_cache_bytes(), f"the environment variable {KV_VARIABLE}, in GiB"),
    ]
    return [part for part in parts if part.bytes]


def _states(args, shape: ModelShape) -> int:
    """Of an optimizer, over all learners: master weights, moments, gradients in BF16 and, for the step, in float32."""
    p = shape.parameters
    adam = p - shape.matrices if args.actor.optim == "muon" else p
    return (4 * p + 4 * (p + adam) + 2 * p + 4 * p) * (1 if args.ds.zero_stage else data_parallel(args))


def _matrices(args, shape: ModelShape, copy: int) -> int:
    """Of Muon's exchanges, over all learners."""
    ranks = data_parallel(args)
    if args.actor.optim != "muon":
        return 0
    return ranks * peak_bytes(shape.stacks, shape.matrices, ranks if args.ds.zero_stage else 1, in_float32=copy == 4)


def _kept(args, shape: ModelShape, tokens: int) -> int:
    """Activations of so many tokens until their backward."""
    return layer_activations(shape, tokens) * (2 if args.actor.gradient_checkpointing_enable else shape.layers)


def _critic(args, shape: ModelShape, copy: int) -> int:
    """Of all processes of a critic; args: its own (``as_critic``)."""
    ranks = data_parallel(args)
    weights = 2 * shape.parameters * (1 if args.ds.zero_stage == 3 else ranks)
    return ranks * PROCESS + weights + _states(args, shape) + _matrices(args, shape, copy) + _kept(args, shape, micro_batch_tokens(args) * ranks)


def kv_cache_bytes() -> int:
    """Of one engine rank: what the environment variable says, else 1 GiB (``runtime.CPU_ENVIRONMENT``)."""
    return int(float(os.environ.get(KV_VARIABLE, 1)) * GIB)


def host_report(args, shape: ModelShape, critic: ModelShape | None = None, machine: int | None = None) -> tuple[str, list[str]]:
    """(table, problems): GiB by part, and whether a machine of so many bytes (default: this one) holds them."""
    machine = machine_bytes() if machine is None else machine
    parts = host_parts(args, shape, critic)
    total = sum(part.bytes for part in parts)
    width = max(len(part.name) for part in parts)
    lines = [f"{part.name:<{width}}  {part.bytes / GIB:6.2f} GiB" for part in parts]
    lines.append(f"{'total':<{width}}  {total / GIB:6.2f} GiB of the machine's {gib(machine)}")
    responses = kv_cache_bytes() // (kv_bytes_per_token(shape, args.vllm.tensor_parallel_size) * args.data.max_len)
    lines.append(f"KV cache: {responses} responses of {args.data.max_len:,} tokens at a time")
    problems = []
    if total > machine:
        largest = max((part for part in parts if part.advice), key=lambda part: part.bytes)
        problems.append(
            f"this run needs about {gib(total)} of main memory, and this machine has {gib(machine)}: lower {largest.name} "
            f"({gib(largest.bytes)}) with {largest.advice}, or take a smaller model"
        )
    if responses < 1:
        problems.append(
            f"no KV cache for one response of --data.max_len {args.data.max_len}: raise {KV_VARIABLE} (GiB), or lower --data.max_len"
        )
    return "\n".join(lines), problems
