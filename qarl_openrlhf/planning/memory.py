"""Bytes a GPU by part, estimated from the model's shape and the flags.

Tensors that are counted exactly: parameters, master weights, optimizer state, gradients, the quantization cache, engine weights,
KV cache. Estimated: activations, logits, what CUDA and vLLM take beside them (the constants below, with their reason). Phases
follow a training step; only what exists in a phase is added up.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from qarl_openrlhf.engine.engine_args import engine_args
from qarl_openrlhf.optim.exchange import peak_bytes
from qarl_openrlhf.optim.groups import matrix_shapes
from qarl_openrlhf.planning.offload import MOMENT_8BIT, average_bytes, data_parallel, eight_bits, offloaded, pieces
from qarl_openrlhf.planning.reduce_bucket import reduce_bucket
from qarl_openrlhf.quant.convert import ConversionReport
from qarl_openrlhf.quant.scheme import QuantScheme

GIB = 2**30
CONTEXT = int(1.25 * GIB)  # CUDA context, NCCL buffers and kernels of one process
ENGINE_WORK = 2 * GIB  # vLLM beside weights and KV cache: activations of a prefill batch, sampler, CUDA graphs
AT_ONCE = 128  # responses that it samples at a time by default, counted in that
SAMPLED = 40  # bytes of each further one, times the vocabulary: float32 logits, and what vLLM's sampler makes of them as it warms up
LIVE = 1_000_000_000  # ZeRO-3 gathers at most this many parameters at a time, and one leaf module
# A token's logits, times the vocabulary: float32 logits kept for the backward, the accumulated gradient, and the gradient of the
# chunk (or of the gather) being added to it.
LOGITS = 12
CHUNK_LOGITS = 2  # the same of a chunk on a card: BF16 logits, which their gradient overwrites (kernels.token_log_probs)
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: codes, and scales of 64 in 8 bits with float32 scales of 256 of their own
SHARE = "--vllm.gpu_memory_utilization"
# With checkpointing, a micro-batch's logits are gone before the backward computes the first layer anew: what only one of them needs
# is never beside what only the other does.
PHASES = ("rollout", "logits", "layers", "optimizer step", "publish")
AT_WORK = 1.1  # activations and gradients of the layer at work, times those that its forward makes; 1.0 and 1.1 in benchmarks/results/allocations_*
_DECODER_LAYER = re.compile(r".*?\blayers\.\d+\.")
USABLE = 0.97  # of a card's memory: the driver's share, and what the allocator cannot give out in one piece


@dataclass(frozen=True)
class ModelShape:
    """What the estimate needs of a model; counts of weights, not bytes.

    quantized: weights the scheme quantizes; matrices: weights Muon updates; largest: largest quantized layer (or stack of
    experts); largest_other: largest tensor that stays BF16. mlp: intermediate features a token passes through.
    """

    parameters: int
    quantized: int
    matrices: int
    largest: int
    largest_other: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    experts_hidden: int = 0  # hidden features of the sorted copies a mixture of experts makes, a token
    tensors: tuple[tuple[int, bool], ...] = ()  # (weights, whether Muon updates it) of each parameter, in order
    layer: int = 0  # weights of the largest decoder layer
    stacks: tuple[tuple[int, int, int], ...] = ()  # (count, rows, columns) of the parameters that Muon updates, each shape once

    @classmethod
    def of(cls, model, report: ConversionReport, config) -> "ModelShape":
        """Read off a model on the meta device and the plan of its conversion."""
        text = config.get_text_config()
        quantized = {layer.name for layer in report.quantized}
        plain = [p.numel() for name, p in model.named_parameters() if name.removesuffix(".weight") not in quantized]
        active = getattr(text, "num_experts_per_tok", 0) if getattr(text, "num_experts", 0) else 0
        matrices = matrix_shapes(model)
        in_layer = Counter()
        for name, p in model.named_parameters():
            if found := _DECODER_LAYER.match(name):
                in_layer[found[0]] += p.numel()
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            quantized=sum(p.experts * p.out_features * p.in_features for p in report.quantized),
            matrices=sum(count * rows * columns for count, rows, columns in matrices.values()),
            largest=max([p.experts * p.out_features * p.in_features for p in report.quantized], default=0),
            largest_other=max(plain, default=0),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            mlp=active * text.moe_intermediate_size if active else text.intermediate_size,
            vocabulary=text.vocab_size,
            experts_hidden=active * text.hidden_size,
            tensors=tuple((p.numel(), name in matrices) for name, p in model.named_parameters()),
            layer=max(in_layer.values(), default=0),
            stacks=tuple(sorted(set(matrices.values()))),
        )


@dataclass
class Part:
    """One part of the memory of one GPU. advice: flags that lower it, with these arguments; empty if none does."""

    name: str
    bytes: int
    phases: tuple[str, ...]
    advice: str = ""


@dataclass
class Estimate:
    """Parts of one GPU that plays ``role``; ``host``: bytes of main memory a node, for what is offloaded."""

    role: str
    parts: list[Part]
    host: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(phase for part in self.parts for phase in part.phases))

    def total(self, phase: str) -> int:
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> str:
        return max(self.phases, key=self.total)

    def problem(self, card: int) -> str | None:
        """Why this does not fit a card of so many bytes, naming the largest part that a flag lowers; None if it fits."""
        phase, usable = self.peak, int(card * USABLE)
        if self.total(phase) <= usable:
            return None
        parts = sorted((p for p in self.parts if phase in p.phases), key=lambda p: -p.bytes)
        lower = next((p for p in parts if p.advice), parts[0])
        others = [p for p in parts if p.advice and p is not lower][:1]
        hint = f"lower {lower.name} ({gib(lower.bytes)}): {lower.advice or 'a larger card, or more of them'}"
        hint += "".join(f"; or {p.name} ({gib(p.bytes)}): {p.advice}" for p in others)
        return f"{self.role} needs about {gib(self.total(phase))} in phase '{phase}', {gib(usable)} of the card are usable; {hint}"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def packed_bytes(scheme: QuantScheme) -> float:
    """Bytes a quantized weight has in the published format, scales included (row scales of 8-bit formats are negligible)."""
    if not scheme.quantized:
        return 2.0
    return 0.5 + 2 / scheme.group_size if scheme.weight_format == "int4" else 1.0


def staging_bytes(bucket_mb: float, shape: ModelShape, scheme: QuantScheme) -> int:
    """The two buffers of an end of a push: each holds a bucket, or the largest tensor, which travels whole whatever the TP."""
    return 2 * max(int(bucket_mb * 2**20), int(shape.largest * packed_bytes(scheme)), 2 * shape.largest_other)


def rebuilt_bytes(shape: ModelShape, tp: int) -> int:
    """The layer that an engine's rank brings into its kernels' layout on the side: at most its BF16 weights, before and after."""
    return int(2 * shape.layer / tp)


def cache_bytes(scheme: QuantScheme, mode: str, shape: ModelShape) -> int:
    """The learner's quantization cache on every rank, at every ZeRO stage: the whole model's packed weights are on each."""
    if not scheme.quantized or mode == "none":
        return 0
    codes = 1 if scheme.name == "w4a8" else 0  # the e4m3 matrix its product reads, beside the copy for the backward
    return int(shape.quantized * (packed_bytes(scheme) + (2 + codes if mode == "dequant" else 0)))


def micro_batch_tokens(args) -> int:
    """Tokens of the largest micro-batch on one GPU."""
    if args.train.dynamic_batch_enable:
        return max(args.train.max_tokens_per_gpu, args.data.max_len)
    return args.train.micro_batch_size * args.data.max_len


def estimate(args, shape: ModelShape) -> list[Estimate]:
    """Estimates of the kinds of GPU this run has: one that learner and engine share, or one of each."""
    shared = args.train.colocate_all and not args.train.async_enable
    phases = list(PHASES)
    learner = _learner(args, shape, phases)
    learner.parts.append(Part("CUDA context, NCCL (learner)", CONTEXT, tuple(phases)))
    if not args.vllm.num_engines:
        return [learner]
    engine = _engine(args, shape, phases if shared else ["rollout", "publish"], shared)
    if not shared:
        return [learner, engine]
    both = Estimate("each GPU (learner and engine)", learner.parts + engine.parts, learner.host + engine.host)
    both.notes = learner.notes + engine.notes
    return [both]


def learner_tensors(args, shape: ModelShape) -> int:
    """The learner's part of the estimate at its peak, without what CUDA and NCCL take: what PyTorch's allocator would count."""
    learner = _learner(args, shape, list(PHASES))
    return learner.total(learner.peak)


def _learner(args, shape: ModelShape, phases: list[str]) -> Estimate:
    rollout, logits, layers, step, publish = phases
    backward = (logits, layers)
    scheme, stage = QuantScheme.parse(args.quant.scheme), args.ds.zero_stage
    copies = data_parallel(args)
    offload, sleeps = args.ds.adam_offload, args.ds.enable_sleep
    p = shape.parameters
    states = (*backward, step) if sleeps else tuple(phases)
    share = p / copies if stage >= 1 else p
    fewer = "" if offload else "--ds.adam_offload (host memory), or more GPUs" + ("" if stage else " with --ds.zero_stage 2")
    zero3 = "" if stage == 3 or copies == 1 else "--ds.zero_stage 3"
    adam = p - shape.matrices if args.actor.optim == "muon" else p
    eight = eight_bits(args)
    moments = 2 * sum(MOMENT_8BIT) * p if eight else 4 * (p + adam)  # Muon: one momentum a matrix weight; AdamW: two
    moments /= copies if stage >= 1 else 1
    parts = [
        Part("BF16 parameters", int(2 * (p / copies if stage == 3 else p)), tuple(phases), zero3),
        Part("master weights (FP32)", 0 if offload else int(4 * share), states, fewer),
        Part(f"optimizer state{' (8 bits)' if eight else ''}", 0 if offload else int(moments), states, fewer),
        Part("gradients for the step", 0 if offload else _stepped(args, shape), (step,), fewer),
    ]
    if args.actor.optim == "muon":
        size = peak_bytes(shape.stacks, shape.matrices, copies if stage else 1)
        parts.append(Part("whole matrices (Muon)", size, (step,)))
    tensor = max(shape.largest, shape.largest_other)
    parts += _gradients(p, tensor, copies, stage, offload, args.ds.overlap_comm, phases, states, zero3 or fewer)
    if stage:
        arriving = shape.layer if shape.experts_hidden else tensor  # both stacks of a block of experts come from one backward
        parts.append(Part("gradients that have just been made", 2 * arriving, (layers,)))
    if stage == 3:
        live = max(min(p, LIVE + (shape.layer if shape.experts_hidden else 0)), tensor)
        parts.append(Part("gathered parameters (ZeRO-3)", 2 * live, (layers, publish)))
        parts.append(Part("gathered lm_head (ZeRO-3)", 2 * shape.largest_other, (logits,)))
    mode = args.quant.cache
    less = {"dequant": "--quant.cache packed", "packed": "--quant.cache none (quantizes in every forward)"}.get(mode, "")
    parts.append(Part(f"quantization cache ({mode})", cache_bytes(scheme, mode, shape), tuple(phases), less))
    if scheme.aligned and mode == "none" and not args.actor.gradient_checkpointing_enable:
        # The backward reads what its forward made, and the loss lives until the step is over.
        parts.append(Part("packed weights of a forward", cache_bytes(scheme, "packed", shape), (*backward, step)))
    if scheme.aligned and mode != "dequant":
        parts.append(Part("one layer dequantized", int(2 * shape.largest), (layers,)))
    tokens = micro_batch_tokens(args)
    parts += _activations(args, shape, tokens, logits, layers)
    if args.algo.kl.init_coef > 0 and not args.ref.offload:
        nf4 = args.ref.load_in_4bit  # whole on every GPU; embeddings, lm_head and norms stay BF16
        size = NF4 * shape.matrices + 2 * (p - shape.matrices) if nf4 else 2 * (p / copies if stage == 3 else p)
        parts.append(Part(f"reference model{' (NF4)' if nf4 else ''}", int(size), tuple(phases), "" if nf4 else "--ref.load_in_4bit or --ref.offload"))
    average, average_host = average_bytes(args, shape)
    if average:
        parts.append(Part("moving average", average, tuple(phases), "--ds.zero_stage 3 (main memory), or no --train.enable_ema"))
    parts.append(Part("sync buffers (rank 0)", staging_bytes(args.sync.bucket_mb, shape, scheme), tuple(phases)))
    notes = [f"{tokens:,} tokens in the largest micro-batch"]
    if args.critic.model_name_or_path or not args.reward.remote_url:
        notes.append("not counted: critic and reward model")
    return Estimate("each learner GPU", parts, offloaded(args, shape) + average_host, notes)


def _gradients(p: int, largest: int, copies: int, stage: int, offload: bool, overlap: bool, phases, states, advice: str) -> list[Part]:
    """BF16 gradients: this rank's share until the step, and what is on its way to the others.

    ZeRO-1 accumulates all of them on every rank, ZeRO-3 keeps its share and its bucket for the whole run.
    """
    _, *backward, step, _ = phases
    if stage == 0:
        return [Part("gradients", 2 * p, states, advice)]
    share = 0 if offload else 2 * p // copies
    # DeepSpeed keeps room for the largest tensor's gradient on its way to main memory.
    moving = 2 * largest if offload and stage < 3 else 0
    bucket = 2 * reduce_bucket(p) * (2 if overlap and stage < 3 else 1)
    # A step of ZeRO-1 or 2 counts its own (_stepped).
    until = states if stage == 3 else tuple(backward)
    parts = [
        Part("gradients", share, until, advice),
        Part("a gradient on its way to main memory", moving, tuple(phases)),
        Part("reduce bucket", bucket, tuple(phases) if stage == 3 else tuple(backward)),
    ]
    if stage == 1:
        parts.append(Part("gradients of the other ranks' shares (ZeRO-1)", 2 * p - share, tuple(backward), advice))
    return parts


def _stepped(args, shape: ModelShape) -> int:
    """Gradients at most, while the optimizer steps one flat tensor after the other.

    ZeRO-3 has those of a piece in FP32, beside its buffer of all of them. ZeRO-1 and 2 let the BF16 ones of a piece go only when
    there is a flat copy, and that in FP32, too; those of the pieces to come are there as well.
    """
    weights = [count for count, _ in pieces(args, shape)]
    if args.ds.zero_stage == 3:
        return 4 * max(weights, default=0)
    if args.ds.zero_stage == 0:
        return 4 * shape.parameters
    return max((2 * sum(weights[i:]) + 6 * weights[i] for i in range(len(weights))), default=0)


def layer_activations(shape: ModelShape, tokens: int) -> int:
    """Bytes that a layer's forward keeps of so many tokens, in BF16, on a GPU and on a CPU."""
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # residuals, norms (in float32, too), rotated q and k, attention output, gate, up, their product, the rows sorted by expert
    return 2 * tokens * (10 * shape.hidden + 3 * attention + 4 * shape.mlp + 3 * shape.experts_hidden)


def _activations(args, shape: ModelShape, tokens: int, logits: str, layers: str) -> list[Part]:
    """Activations of the layers and logits of one micro-batch, BF16, attention without a [T, T] matrix."""
    layer = layer_activations(shape, tokens)
    checkpointing = args.actor.gradient_checkpointing_enable
    shorter = "--train.max_tokens_per_gpu" if args.train.dynamic_batch_enable else "--train.micro_batch_size"
    shorter = f"a smaller {shorter} or --data.max_len"
    both, advice = (logits, layers), "--actor.gradient_checkpointing_enable"
    if checkpointing:
        parts = [
            Part("inputs of the layers", 2 * tokens * shape.hidden * shape.layers, both, shorter),
            Part("activations of a layer", int(AT_WORK * layer), (layers,), shorter),
        ]
    else:
        parts = [Part("activations", layer * (shape.layers + 1), both, advice)]
    return [*parts, _logits(args, shape, tokens, logits, shorter)]


def _logits(args, shape: ModelShape, tokens: int, phase: str, shorter: str) -> Part:
    """Logits of a micro-batch, or of a chunk of it; then also lm_head's gradient, summed in float32, beside a chunk's."""
    chunk, each = args.actor.logprob_chunk, LOGITS * shape.vocabulary
    if not chunk:
        return Part("logits", each * tokens, (phase,), f"--actor.logprob_chunk 2048, or {shorter}")
    if args.quant.kernel != "torch":
        each = CHUNK_LOGITS * shape.vocabulary
    summed = 6 * shape.vocabulary * shape.hidden
    return Part("logits (a chunk)", each * min(chunk, tokens) + summed, (phase,), "a smaller --actor.logprob_chunk")


def _engine(args, shape: ModelShape, phases: list[str], shared: bool) -> Estimate:
    scheme, tp = QuantScheme.parse(args.quant.scheme), args.vllm.tensor_parallel_size
    weights = int((shape.quantized * packed_bytes(scheme) + 2 * (shape.parameters - shape.quantized)) / tp)
    more = max(0, engine_args(args).get("max_num_seqs", 0) - AT_ONCE)
    asleep = shared and args.vllm.enable_sleep
    everywhere = ("rollout",) if asleep else tuple(phases)
    less = f"a smaller {SHARE}" + ("" if asleep or not shared else ", or --vllm.enable_sleep")
    parts = [
        Part("engine weights", weights, ("rollout", "publish") if asleep else tuple(phases), "a larger --vllm.tensor_parallel_size"),
        Part("engine working memory", ENGINE_WORK + SAMPLED * shape.vocabulary * more, everywhere),
        Part("KV cache", 0, everywhere, less),  # filled in by complete()
    ]
    parts.append(Part("CUDA context, NCCL (engine)", CONTEXT, tuple(phases)))
    parts.append(Part("a layer brought into its kernel's layout", rebuilt_bytes(shape, tp), ("publish",)))
    if not shared:  # colocated engines read the learner's buffers, or copy one where the learner has none: counted there
        staging = staging_bytes(args.sync.bucket_mb, shape, scheme)
        bucket = staging == 2 * int(args.sync.bucket_mb * 2**20)
        parts.append(Part("sync buffers (engine)", staging, tuple(phases), "a smaller --sync.bucket_mb" if bucket else ""))
    return Estimate("each engine GPU", parts, weights * args.actor.num_gpus_per_node if asleep else 0)


def kv_bytes_per_token(shape: ModelShape, tp: int) -> int:
    """BF16 keys and values of one token on one engine rank (vLLM gives each rank at least one head)."""
    return 2 * 2 * shape.layers * max(1, shape.kv_heads // tp) * shape.head_dim


def complete(estimates: list[Estimate], args, shape: ModelShape, card: int | None) -> list[str]:
    """Fill in the KV cache that vLLM will take on a card of so many bytes (None: room for one response of the longest kind).

    Returns problems of the engine itself: no room for a single response.
    """
    tp = args.vllm.tensor_parallel_size
    each = kv_bytes_per_token(shape, tp) * args.data.max_len
    problems = []
    for one in estimates:
        parts = {part.name: part for part in one.parts}
        if "KV cache" not in parts:
            continue
        if card is None:
            parts["KV cache"].bytes = each
            continue
        share = args.vllm.gpu_memory_utilization
        beside = parts["engine weights"].bytes + parts["engine working memory"].bytes + CONTEXT
        fixed = engine_args(args).get("kv_cache_memory_bytes")
        room = int(card * share) - beside if fixed is None else int(fixed)
        parts["KV cache"].bytes = max(0, room)
        if room < each and fixed is not None:
            problems.append(
                f"no KV cache: kv_cache_memory_bytes {fixed} of --vllm.engine_args is less than the {gib(each)} of one response of "
                f"--data.max_len {args.data.max_len}: raise it, or lower --data.max_len"
            )
        elif room < each:
            problems.append(
                f"no KV cache: --vllm.gpu_memory_utilization {share:g} of {gib(card)} leaves {gib(room)} beside engine weights "
                f"({gib(parts['engine weights'].bytes)}) and working memory, and one response of --data.max_len "
                f"{args.data.max_len} needs {gib(each)}: raise it or --vllm.tensor_parallel_size, or lower --data.max_len"
            )
        parts["KV cache"].advice = _smaller_cache(one, parts, card, beside, each, fixed is not None)
        one.notes.append(f"KV cache: {max(0, room) // each} responses of {args.data.max_len:,} tokens at a time")
    return problems


def _smaller_cache(one: Estimate, parts: dict[str, Part], card: int, beside: int, each: int, fixed: bool) -> str:
    """What lowers the KV cache, with a value at which all phases fit that it is in, where one response then still does.

    vLLM takes its share when it starts, whatever comes later: the buffers of the first push, a colocated learner.
    """
    if fixed:
        return "a smaller kv_cache_memory_bytes of --vllm.engine_args"
    cache = parts["KV cache"]
    others = max(one.total(phase) for phase in cache.phases) - cache.bytes
    room = int(card * USABLE) - others
    share = math.floor((room + beside) / card * 100) / 100
    if int(card * share) - beside < each:
        return cache.advice
    return cache.advice.replace(f"a smaller {SHARE}", f"{SHARE} {share:g}")
