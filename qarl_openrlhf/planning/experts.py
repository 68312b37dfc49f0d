"""How the engine splits a mixture of experts over its GPUs."""

from qarl_openrlhf.engine.engine_args import engine_args
from qarl_openrlhf.quant.convert import LayerPlan


def ranks_of(args, layer: LayerPlan) -> int:
    """Engine ranks that share one such layer: expert parallel ranks hold experts whole."""
    whole = layer.experts > 1 and engine_args(args).get("enable_expert_parallel")
    return 1 if whole else args.vllm.tensor_parallel_size
