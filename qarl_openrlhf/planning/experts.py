"""How the engine splits a mixture of experts over its GPUs, and what its kernel for 4-bit experts cannot do."""

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.engine.engine_args import engine_args
from qarl_openrlhf.quant.convert import LayerPlan

EXPERT_PARALLEL = "--vllm.engine_args '{\"enable_expert_parallel\": true}'"


def ranks_of(args, layer: LayerPlan) -> int:
    """Engine ranks that share one such layer: expert parallel ranks hold experts whole."""
    whole = layer.experts > 1 and engine_args(args).get("enable_expert_parallel")
    return 1 if whole else args.vllm.tensor_parallel_size


def check_groups(args, layer: LayerPlan) -> None:
    """ConfigError where a rank's share of an expert is one group of 4-bit weights, on a GPU.

    vLLM's Marlin experts were 0.6 nats a token off there, and right with two groups. patches.vllm_experts mends what we take for the
    cause; this goes once a card has shown that it does (tests/gpu/test_transports.py, with experts of 256 features).
    """
    scheme, ranks = layer.scheme, ranks_of(args, layer)
    if args.device != "cuda" or layer.experts == 1 or scheme.name != "w4a16":
        return
    split = ranks if layer.name.endswith(".down_proj") else 1
    features = layer.in_features // split
    if features != scheme.group_size:
        return
    smaller = [f"{scheme.name}:g{size}" for size in (64, 32) if size < scheme.group_size]
    works = [f"--quant.scheme {' or '.join(smaller)}"] if smaller else []
    if ranks > 1:
        works.append(f"a smaller --vllm.tensor_parallel_size than {ranks}, or {EXPERT_PARALLEL}")
    raise ConfigError(
        f"layer {layer.name}: {features} input features a rank are one group of {scheme}, for which vLLM's 4-bit experts "
        f"computed wrong products; use {', or '.join(works) or '--quant.scheme fp8'}"
    )
