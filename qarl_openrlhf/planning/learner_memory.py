"""Bytes of a learner on its GPU: the policy's, and a critic's.

Tensors that are counted exactly: parameters, master weights, optimizer state, gradients, the quantization cache. Estimated:
activations and logits.
"""

from types import SimpleNamespace

from qarl_openrlhf.optim.exchange import peak_bytes
from qarl_openrlhf.planning.model_shape import ModelShape, cache_bytes, layer_activations, staging_bytes
from qarl_openrlhf.planning.offload import MOMENT_8BIT, average_bytes, data_parallel, eight_bits, offloaded, pieces
from qarl_openrlhf.planning.parts import Estimate, Part
from qarl_openrlhf.planning.reduce_bucket import reduce_bucket
from qarl_openrlhf.quant.scheme import QuantScheme

LIVE = 1_000_000_000  # ZeRO-3 gathers at most this many parameters at a time, and one leaf module
# A token's logits, times the vocabulary: float32 logits kept for the backward, the accumulated gradient, and the gradient of the
# chunk (or of the gather) being added to it.
LOGITS = 12
CHUNK_LOGITS = 2  # the same of a chunk on a card: BF16 logits, which their gradient overwrites (kernels.token_log_probs)
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: codes, and scales of 64 in 8 bits with float32 scales of 256 of their own
AT_WORK = 1.1  # activations and gradients of the layer at work, times those that its forward makes; 1.0 and 1.1 in benchmarks/results/allocations_*


def micro_batch_tokens(args) -> int:
    """Tokens of the largest micro-batch on one GPU."""
    if args.train.dynamic_batch_enable:
        return max(args.train.max_tokens_per_gpu, args.data.max_len)
    return args.train.micro_batch_size * args.data.max_len


def policy(args, shape: ModelShape, phases: tuple[str, ...]) -> Estimate:
    """The policy's learner, in phases (rollout, logits, layers, optimizer step, publish)."""
    _, logits, layers, step, publish = phases
    scheme, stage = QuantScheme.parse(args.quant.scheme), args.ds.zero_stage
    copies, p = data_parallel(args), shape.parameters
    parts = _trained(args, shape, phases)
    if stage == 3:
        parts.append(Part("gathered lm_head (ZeRO-3)", 2 * shape.largest_other, (logits,)))
    mode = args.quant.cache
    less = {"dequant": "--quant.cache packed", "packed": "--quant.cache none (quantizes in every forward)"}.get(mode, "")
    parts.append(Part(f"quantization cache ({mode})", cache_bytes(scheme, mode, shape), phases, less))
    if scheme.aligned and mode == "none" and not args.actor.gradient_checkpointing_enable:
        # The backward reads what its forward made, and the loss lives until the step is over.
        parts.append(Part("packed weights of a forward", cache_bytes(scheme, "packed", shape), (logits, layers, step)))
    if scheme.aligned and mode != "dequant":
        parts.append(Part("one layer dequantized", int(2 * shape.largest), (layers,)))
    tokens = micro_batch_tokens(args)
    parts += [*_activations(args, shape, tokens, logits, layers), _logits(args, shape, tokens, logits, _shorter(args))]
    if args.algo.kl.init_coef > 0 and not args.ref.offload:
        nf4 = args.ref.load_in_4bit  # whole on every GPU; embeddings, lm_head and norms stay BF16
        size = NF4 * shape.matrices + 2 * (p - shape.matrices) if nf4 else 2 * (p / copies if stage == 3 else p)
        parts.append(Part(f"reference model{' (NF4)' if nf4 else ''}", int(size), phases, "" if nf4 else "--ref.load_in_4bit or --ref.offload"))
    average, average_host = average_bytes(args, shape)
    if average:
        parts.append(Part("moving average", average, phases, "--ds.zero_stage 3 (main memory), or no --train.enable_ema"))
    parts.append(Part("sync buffers (rank 0)", staging_bytes(args.sync.bucket_mb, shape, scheme), phases))
    notes = [f"{tokens:,} tokens in the largest micro-batch"]
    if not args.reward.remote_url:
        notes.append("not counted: reward model")
    return Estimate("each learner GPU", parts, offloaded(args, shape) + average_host, notes)


def critic(args, shape: ModelShape, phases: tuple[str, ...]) -> Estimate:
    """The critic's learner, which is never quantized; shape: its model's, without an lm_head. Its values are a number a token."""
    args = as_critic(args)
    _, logits, layers, _, _ = phases
    parts = _trained(args, shape, phases) + _activations(args, shape, micro_batch_tokens(args), logits, layers)
    return Estimate("each critic GPU", parts, offloaded(args, shape))


def as_critic(args):
    """The arguments with the critic's GPUs and optimizer in place of the policy's; the other flags of the policy are the critic's, too."""
    actor = SimpleNamespace(**(vars(args.actor) | vars(args.critic)))
    return SimpleNamespace(**(vars(args) | {"actor": actor}))


def _trained(args, shape: ModelShape, phases: tuple[str, ...]) -> list[Part]:
    """What DeepSpeed holds of any model that it trains."""
    _, logits, layers, step, publish = phases
    stage, copies = args.ds.zero_stage, data_parallel(args)
    offload = args.ds.adam_offload
    p = shape.parameters
    states = (logits, layers, step) if args.ds.enable_sleep else phases
    share = p / copies if stage >= 1 else p
    fewer = "" if offload else "--ds.adam_offload (host memory), or more GPUs" + ("" if stage else " with --ds.zero_stage 2")
    zero3 = "" if stage == 3 or copies == 1 else "--ds.zero_stage 3"
    adam = p - shape.matrices if args.actor.optim == "muon" else p
    eight = eight_bits(args)
    moments = 2 * sum(MOMENT_8BIT) * p if eight else 4 * (p + adam)  # Muon: one momentum a matrix weight; AdamW: two
    moments /= copies if stage >= 1 else 1
    parts = [
        Part("BF16 parameters", int(2 * (p / copies if stage == 3 else p)), phases, zero3),
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
    return parts


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
        Part("a gradient on its way to main memory", moving, phases),
        Part("reduce bucket", bucket, phases if stage == 3 else tuple(backward)),
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


def _activations(args, shape: ModelShape, tokens: int, logits: str, layers: str) -> list[Part]:
    """Activations of the layers of one micro-batch, BF16, attention without a [T, T] matrix."""
    layer = layer_activations(shape, tokens)
    both, shorter = (logits, layers), _shorter(args)
    if args.actor.gradient_checkpointing_enable:
        return [
            Part("inputs of the layers", 2 * tokens * shape.hidden * shape.layers, both, shorter),
            Part("activations of a layer", int(AT_WORK * layer), (layers,), shorter),
        ]
    return [Part("activations", layer * (shape.layers + 1), both, "--actor.gradient_checkpointing_enable")]


def _shorter(args) -> str:
    """Flags that make a micro-batch smaller."""
    return f"a smaller {'--train.max_tokens_per_gpu' if args.train.dynamic_batch_enable else '--train.micro_batch_size'} or --data.max_len"


def _logits(args, shape: ModelShape, tokens: int, phase: str, shorter: str) -> Part:
    """Logits of a micro-batch, or of a chunk of it; then also lm_head's gradient, summed in float32, beside a chunk's."""
    chunk, each = args.actor.logprob_chunk, LOGITS * shape.vocabulary
    if not chunk:
        return Part("logits", each * tokens, (phase,), f"--actor.logprob_chunk 2048, or {shorter}")
    if args.quant.kernel != "torch":
        each = CHUNK_LOGITS * shape.vocabulary
    summed = 6 * shape.vocabulary * shape.hidden
    return Part("logits (a chunk)", each * min(chunk, tokens) + summed, (phase,), "a smaller --actor.logprob_chunk")
