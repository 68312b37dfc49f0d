"""Bytes a GPU by part, estimated from the model's shape and the flags.

Tensors are counted exactly where their shapes are known; activations, logits, and what CUDA and vLLM take beside them are estimates (the
constants, with their reason). Phases follow a training step; only what exists in a phase is added up.
"""

import math

from qarl_openrlhf.engine.engine_args import engine_args
from qarl_openrlhf.planning import learner_memory
from qarl_openrlhf.planning.model_shape import ModelShape, kv_bytes_per_token, packed_bytes, rebuilt_bytes, staging_bytes
from qarl_openrlhf.planning.parts import CONTEXT, GIB, USABLE, Estimate, Part, gib
from qarl_openrlhf.quant.scheme import QuantScheme

ENGINE_WORK = 2 * GIB  # vLLM beside weights and KV cache: activations of a prefill batch, sampler, CUDA graphs
AT_ONCE = 128  # responses that it samples at a time by default, counted in that
SAMPLED = 40  # bytes of each further one, times the vocabulary: float32 logits, and what vLLM's sampler makes of them as it warms up
SHARE = "--vllm.gpu_memory_utilization"
# With checkpointing, a micro-batch's logits are gone before the backward computes the first layer anew: what only one of them needs
# is never beside what only the other does.
PHASES = ("rollout", *(TRAINING := ("logits", "layers", "optimizer step")), "publish")
CRITIC = "critic"  # a critic's training, where it takes turns with the policy


def estimate(args, shape: ModelShape, critic: ModelShape | None = None) -> list[Estimate]:
    """Estimates of the kinds of GPU this run has: one that learner, critic and engine share, or one of each.

    critic: its model's shape, of a run that has one.
    """
    shared = args.train.colocate_all and not args.train.async_enable
    learner = _process(learner_memory.policy(args, shape, PHASES), "learner")
    kinds = [learner]
    if critic:
        other = _process(learner_memory.critic(args, critic, PHASES), "critic")
        if args.train.colocate_all and not args.train.colocate_critic_reward:
            learner.parts += _beside(other, args.ds.enable_sleep)
            learner.host += other.host
            learner.role = "each learner GPU (policy and critic)"
        else:
            kinds.append(other)
    if args.vllm.num_engines:
        engine = _engine(args, shape, list(PHASES) if shared else ["rollout", "publish"], shared)
        if shared:
            learner.role = "each GPU (learner, critic and engine)" if critic and len(kinds) == 1 else "each GPU (learner and engine)"
            learner.parts += engine.parts
            learner.host += engine.host
            learner.notes += engine.notes
        else:
            kinds.append(engine)
    return [_with_every_phase(one) for one in kinds]


def learner_tensors(args, shape: ModelShape) -> int:
    """The learner's part of the estimate at its peak, without what CUDA and NCCL take: what PyTorch's allocator would count."""
    learner = learner_memory.policy(args, shape, PHASES)
    return learner.total(learner.peak)


def _with_every_phase(one: Estimate) -> Estimate:
    """What is there in every phase is there while a critic takes its turn, too."""
    if CRITIC in one.phases:
        for part in one.parts:
            part.phases += (CRITIC,) if part.phases == PHASES else ()
    return one


def _process(one: Estimate, name: str) -> Estimate:
    one.parts.append(Part(f"CUDA context, NCCL ({name})", CONTEXT, PHASES))
    return one


def _beside(critic: Estimate, takes_turns: bool) -> list[Part]:
    """A critic on the policy's GPU in two parts: what it always holds, and what it takes to train.

    It trains while the policy does, before it (and the policy's states are in main memory) where they sleep in turns.
    """
    rest = sum(part.bytes for part in critic.parts if part.phases == PHASES)
    training = (CRITIC,) if takes_turns else TRAINING
    advice = next((part.advice for part in sorted(critic.parts, key=lambda part: -part.bytes) if part.advice), "")
    return [Part("critic, always", rest, PHASES, advice), Part("critic, training", critic.total(critic.peak) - rest, training, advice)]


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
