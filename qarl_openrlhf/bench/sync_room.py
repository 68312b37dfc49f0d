"""What bench_sync refuses before it starts: engines that cannot be split so, weights that do not fit a GPU."""

from qarl_openrlhf.bench import sync
from qarl_openrlhf.bench.step_plan import Model
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.architecture import meta_model
from qarl_openrlhf.planning.host_memory import ENGINE, PROCESS, REST
from qarl_openrlhf.planning.memory import ENGINE_WORK
from qarl_openrlhf.planning.model_shape import cache_bytes, packed_bytes, rebuilt_bytes, staging_bytes
from qarl_openrlhf.planning.parts import CONTEXT, USABLE, gib
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.scheme import QuantScheme


def split_problem(args) -> str | None:
    """Why the engine cannot be split over ``--tp`` ranks like this, with what works; None if it can."""
    shape = sync.SHAPES[args.shape]
    heads, experts = shape["num_attention_heads"], shape.get("num_experts", 0)
    if heads % args.tp:
        works = ", ".join(str(size) for size in (1, 2, 4, 8) if heads % size == 0)
        return f"--tp {args.tp} does not divide the {heads} attention heads of {args.shape}: use {works}"
    if not args.expert_parallel:
        return None
    if not experts:
        moe = ", ".join(name for name, fields in sync.SHAPES.items() if fields.get("num_experts"))
        return f"--expert_parallel with --shape {args.shape}, which has no experts: use a --shape of experts ({moe})"
    if args.tp == 1:
        return "--expert_parallel with --tp 1: one rank holds all experts anyway; use --tp 2 or more"
    if args.transport == "gloo":
        return "--expert_parallel with --transport gloo: an engine on a CPU does not spread experts; use GPUs and --transport nccl"
    return None


def check(args, scheme: str, card: int | None) -> None:
    """QuantError for a layer that the engine's ranks cannot share, ConfigError for what does not fit ``card`` bytes (None: any)."""
    parsed = QuantScheme.parse(scheme)
    for layer in convert_model(meta_model(sync.config_of(args.shape, 1), args.shape), parsed).quantized:
        whole = args.expert_parallel and layer.experts > 1
        parsed.check_layer(layer.name, layer.out_features, layer.in_features, 1 if whole else args.tp)
    if card is None:
        return
    learner, engine = learner_bytes(args, scheme), engine_bytes(args, scheme)
    needs = {"the learner's": (learner, "more --learner_ranks"), "each engine rank's": (engine, "a larger --tp")}
    if args.transport == "ipc":
        needs = {"the": (learner + engine, "--transport nccl on two")}
    for whose, (size, works) in needs.items():
        if size > card * USABLE:
            raise ConfigError(
                f"--shape {args.shape} in {scheme}: {whose} GPU needs about {gib(size)}, {gib(card * USABLE)} are usable: "
                f"use {works}, fewer --layers or a larger card"
            )


def check_host(args, scheme: str, machine: int) -> None:
    """ConfigError for a run on a CPU whose processes do not fit ``machine`` bytes of main memory."""
    model, parsed = Model.of(args.shape, args.layers, scheme), QuantScheme.parse(scheme)
    shape = model.shape
    held, kept = _held(args, model, parsed)
    published = int(shape.quantized * packed_bytes(parsed)) + 2 * (shape.parameters - shape.quantized)
    processes = REST + args.learner_ranks * PROCESS + args.tp * ENGINE
    need = 2 * held + args.learner_ranks * kept + published + processes
    if need > machine:
        raise ConfigError(
            f"--shape {args.shape} in {scheme} on a CPU: {args.learner_ranks} learner processes and an engine need about {gib(need)} of "
            f"main memory, this machine has {gib(machine)}: use --shape tiny or tiny-moe, fewer --layers or --learner_ranks"
        )


def learner_bytes(args, scheme: str) -> int:
    """Of rank 0: its shard, what is gathered, the quantized weights that it keeps, the buckets."""
    model, parsed = Model.of(args.shape, args.layers, scheme), QuantScheme.parse(scheme)
    shape, (weights, kept) = model.shape, _held(args, model, parsed)
    gathered = 2 * 2 * max(shape.largest, shape.largest_other) if args.learner_ranks > 1 else 0
    return int(2 * weights / args.learner_ranks) + gathered + kept + staging_bytes(args.bucket_mb, shape, parsed) + CONTEXT


def _held(args, model: Model, parsed: QuantScheme) -> tuple[int, int]:
    """(parameters that all learner ranks hold together, bytes of quantized weights that each keeps)."""
    weights, kept = model.shape.parameters, cache_bytes(parsed, "packed", model.shape)
    if sync.SHAPES[args.shape].get("num_experts"):  # one layer of them is held
        weights -= (model.shape.layers - 1) * model.layer_weights
        kept //= model.shape.layers
    return weights, kept


def engine_bytes(args, scheme: str) -> int:
    """Of a rank: weights, KV cache, the buckets, and the layer that is brought into the kernels' layout."""
    model = Model.of(args.shape, args.layers, scheme)
    shape, parsed = model.shape, QuantScheme.parse(scheme)
    weights = (shape.quantized * packed_bytes(parsed) + 2 * (shape.parameters - shape.quantized)) / args.tp
    layer = rebuilt_bytes(shape, args.tp)
    cache = sync.ENGINE["kv_cache_memory_bytes"]
    return int(weights + layer) + cache + staging_bytes(args.bucket_mb, shape, parsed) + ENGINE_WORK + CONTEXT
