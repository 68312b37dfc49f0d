"""Quantized mixture-of-experts blocks: transformers' fused 3-D expert weights with the engine's low-bit forward.

transformers 5 keeps a block's experts in two parameters, ``gate_up_proj`` [E, 2 I, H] (gate rows first) and ``down_proj``
[E, H, I], and lets anyone register how they are multiplied. :class:`QuantExperts` is attached to such a module, the model's
config names the implementation "qarl", and the module, its parameters, names, hooks and ZeRO partitioning stay as they were.
Each stacked parameter is quantized in one call, each expert with its own group scales; gradients are straight-through, as in
:mod:`qarl_openrlhf.quant.linear`. The router is not quantized, but its weights stay in float32, as in the engine.
"""

import torch
from torch import Tensor, nn

from qarl_openrlhf.kernels import grouped, moe
from qarl_openrlhf.quant.cache import QuantCache
from qarl_openrlhf.quant.dtypes import in_dtype, product_dtype
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.names import PROJECTIONS
from qarl_openrlhf.quant.packing import PackedWeight
from qarl_openrlhf.quant.scheme import QuantScheme

IMPLEMENTATION = "qarl"
# Of modules made by transformers' use_experts_implementation: what this implementation computes.
_LAYOUT = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
# These routers are softmax, then top-k, then (norm_topk_prob) division by the sum: kernels.moe.route.
_SOFTMAX_ROUTERS = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter")


class ExpertWeight:
    """One stacked weight [E, N, K] of a block: the product with it, and its packed form. scheme None: unquantized."""

    def __init__(self, module: nn.Module, attribute: str, scheme: QuantScheme | None, *, name: str, cache: QuantCache):
        self.module, self.attribute = module, attribute
        self.scheme = scheme if scheme is not None and scheme.quantized else None
        self.name = name
        self.cache = cache

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self.module, self.attribute)

    def packed(self) -> PackedWeight:
        """The quantized parameter, at most one quantization an optimizer step. Under ZeRO-3, gather the weight on a miss."""
        return self.cache.step_weight(self.name, self.weight, self.scheme).packed

    def is_packed(self) -> bool:
        """Whether :meth:`packed` would be served from the cache."""
        return self.cache.holds(self.name, self.weight)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows sorted by expert [T, K], ends int32 [E] -> [T, N]."""
        x = self.taken(x)
        if self.scheme is None or not (self.scheme.aligned or self.cache.quantized_forward):
            return grouped.GroupedPlain.apply(x, self.weight.to(x.dtype), ends)
        quantized = self.cache.step_weight(self.name, self.weight, self.scheme)
        return grouped.GroupedStraightThrough.apply(x, self.weight, in_dtype(quantized, x.dtype), ends)

    def taken(self, x: Tensor) -> Tensor:
        """x in the dtype it is multiplied in: :func:`product_dtype`'s."""
        return x.to(product_dtype(x, self.weight, self.name))


class QuantExperts:
    """The two expert weights of one block, and its forward."""

    def __init__(self, module: nn.Module, schemes: dict[str, QuantScheme | None], *, name: str, cache: QuantCache):
        self.weights = {
            projection: ExpertWeight(module, projection, schemes[projection], name=f"{name}.{projection}", cache=cache)
            for projection in PROJECTIONS
        }
        self.experts = module.num_experts

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], expert ids [T, k], routing weights [T, k] -> [T, H]."""
        first, second = (self.weights[projection] for projection in PROJECTIONS)
        return moe.experts_mlp(first.taken(x), ids, weights, first, second, self.experts)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module with fused experts that transformers lets an implementation be registered for."""
    return {name: m for name, m in model.named_modules() if all(hasattr(m, flag) for flag in (*_LAYOUT, "num_experts"))}


def problem(module: nn.Module) -> str | None:
    """Why :class:`QuantExperts` does not compute what this block computes; None if it does."""
    shapes = {p: len(getattr(w, "ds_shape", w.shape)) for p in PROJECTIONS if (w := getattr(module, p, None)) is not None}
    odd = [f"{flag} is {getattr(module, flag)}" for flag, value in _LAYOUT.items() if getattr(module, flag) != value]
    if shapes != dict.fromkeys(PROJECTIONS, 3):
        odd.append(f"its weights are {sorted(shapes)}, not 3-D {' and '.join(PROJECTIONS)}")
    activation = type(getattr(module, "act_fn", None)).__name__
    if activation not in ("SiLU", "SiLUActivation"):
        odd.append(f"its activation is {activation}, not SiLU")
    return "; ".join(odd) or None


def check(module: nn.Module, name: str) -> None:
    """QuantError if the block is not one that :class:`QuantExperts` computes, or was converted before."""
    if hasattr(module, "quant_experts"):
        raise QuantError(f"{name} is quantized already; load the model in BF16 and convert it once")
    why = problem(module)
    if why:
        raise QuantError(
            f"{name} ({type(module).__name__}): these experts cannot run quantized ({why}). Qwen3-MoE's form works: "
            "gate_up_proj [E, 2I, H] and down_proj [E, H, I] without biases, SiLU; leave these layers unquantized or use bf16"
        )


def attach(module: nn.Module, schemes: dict[str, QuantScheme | None], *, name: str, cache: QuantCache) -> None:
    """Give a block of experts its low-bit forward. schemes: by projection; None leaves one unquantized."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # half of what a command's start would import otherwise

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    module.quant_experts = QuantExperts(module, schemes, name=name, cache=cache)
    module.config._experts_implementation = IMPLEMENTATION


def keep_routing_weights_in_float32(model: nn.Module) -> int:
    """Let the model's softmax top-k routers give float32 weights, not rounded to the model's dtype; returns how many."""
    found = routers(model)
    for router in found.values():
        router.register_forward_hook(_float32_weights)
    return len(found)


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> softmax top-k router; its output is (logits [T, E], weights [T, k], expert ids [T, k])."""
    return {name: m for name, m in model.named_modules() if type(m).__name__ in _SOFTMAX_ROUTERS}


def _float32_weights(router: nn.Module, _args, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits, _, ids = output
    chosen = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, ids)
    return logits, moe.weights_of(chosen, router.norm_topk_prob), ids


def _experts_forward(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """transformers' interface of an experts implementation."""
    return module.quant_experts(x, ids, weights)
