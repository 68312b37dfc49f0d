"""Turn a Hugging Face model into a quantized learner in place, and list what it publishes.

Quantized: every nn.Linear inside the decoder layers. Never quantized: embeddings, lm_head, norms, biases, MoE router gates.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qarl_openrlhf.quant.cache import QuantCache
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.linear import QuantLinear
from qarl_openrlhf.quant.scheme import QuantScheme

_DECODER_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_ROUTER_GATES = ("gate", "shared_expert_gate")  # vLLM runs these unquantized, too


class LayerPlan(NamedTuple):
    """What happens to one linear layer; scheme None: left unquantized, for ``reason``."""

    name: str
    out_features: int
    in_features: int
    scheme: QuantScheme | None
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """The plan of every linear layer, in model order."""

    scheme: QuantScheme
    cache_mode: str
    layers: list[LayerPlan]

    @property
    def quantized(self) -> list[LayerPlan]:
        return [layer for layer in self.layers if layer.scheme is not None]

    def table(self) -> str:
        """One line for each kind of layer (layer numbers folded into ``*``), then the totals."""
        kinds = Counter(p._replace(name=re.sub(r"\.\d+\.", ".*.", p.name)) for p in self.layers)
        rows = [("layer", "count", "[N, K]", "scheme", "")]
        rows += [
            (p.name, str(count), f"[{p.out_features}, {p.in_features}]", str(p.scheme or "-"), p.reason)
            for p, count in kinds.items()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows]
        weights = sum(p.out_features * p.in_features for p in self.quantized)
        lines.append(
            f"{len(self.quantized)} of {len(self.layers)} linear layers in {self.scheme} "
            f"({weights / 1e6:.1f} M weights), cache {self.cache_mode}"
        )
        return "\n".join(lines)


def convert_model(
    model: nn.Module, scheme: QuantScheme, *, cache: str = "packed", skip: tuple[str, ...] = (), tp: int = 1
) -> ConversionReport:
    """Swap every nn.Linear of a dense decoder model for a :class:`QuantLinear`; sets ``model.quant_cache``.

    cache: ``packed``, ``dequant`` or ``none``. skip: names or fnmatch patterns of layers to leave unquantized. tp: the
    engine's tensor-parallel size, which decides whether the groups fit. Works on meta and ZeRO-3 partitioned parameters.
    QuantError, before anything is changed, for a layer that cannot run the scheme.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    plans = [_plan(name, linear, scheme, skip) for name, linear in linears.items()]
    for plan in plans:
        if plan.scheme is not None:
            QuantLinear.check(linears[plan.name], plan.name)
            scheme.check_layer(plan.name, plan.out_features, plan.in_features, tp)
    if scheme.quantized:
        if not any(plan.scheme for plan in plans):
            raise QuantError(f"{type(model).__name__} has no nn.Linear in a `layers.N.` module: nothing to run {scheme} on")
        _refuse_fused_experts(model, scheme, skip)
    quant_cache = QuantCache(cache)
    for plan in plans:
        if type(linears[plan.name]) is nn.Linear:  # other classes (LoRA, 4-bit) keep their own product
            QuantLinear.convert(linears[plan.name], plan.scheme, name=plan.name, cache=quant_cache)
    model.quant_cache = quant_cache
    return ConversionReport(scheme, cache, plans)


def _plan(name: str, linear: nn.Linear, scheme: QuantScheme, skip: tuple[str, ...]) -> LayerPlan:
    n, k = getattr(linear.weight, "ds_shape", linear.weight.shape)
    if not scheme.quantized:
        reason = "bf16"
    elif not _DECODER_LAYER.search(name):
        reason = "outside the decoder layers"
    elif name.rsplit(".", 1)[-1] in _ROUTER_GATES:
        reason = "router gate"
    elif any(fnmatchcase(name, pattern) for pattern in skip):
        reason = "skipped by name"
    else:
        return LayerPlan(name, n, k, scheme, "engine only" if scheme.rollout_only else "")
    return LayerPlan(name, n, k, None, reason)


def _refuse_fused_experts(model: nn.Module, scheme: QuantScheme, skip: tuple[str, ...]) -> None:
    # Expert weights of transformers 5 are 3-D parameters, not nn.Linear: leaving them in BF16 would be silent misalignment.
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) == 3 and _DECODER_LAYER.search(name) and not any(fnmatchcase(name, p) for p in skip):
            raise QuantError(f"{name} {list(shape)}: fused MoE experts cannot run {scheme} yet; use a dense model or bf16")


@torch.no_grad()
def published_tensors(
    model: nn.Module, scheme: QuantScheme, *, gather: Callable | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of everything an engine or a checkpoint needs, in model order.

    Quantized layers give their packed tensors (``<layer>.weight_packed`` and so on), each other parameter itself; a tied
    lm_head comes once, under the embedding's name. gather: ``deepspeed.zero.GatheredParameters`` under ZeRO-3 (then every
    rank must exhaust the iterator); layers that the cache holds are not gathered.
    """
    layers = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.scheme}
    made_for = {layer.scheme for layer in layers.values()}
    if made_for != ({scheme} if scheme.quantized else set()):
        raise QuantError(f"the model was converted for {[str(s) for s in made_for] or 'no scheme'}, not for {scheme}")
    for name, parameter in model.named_parameters():
        layer = layers.get(name)
        if layer is None:
            yield name, _gathered(gather, parameter, parameter.detach)
            continue
        packed = layer.packed() if layer.is_packed() else _gathered(gather, parameter, layer.packed)
        for suffix, tensor in packed.tensors().items():
            yield f"{name.removesuffix('weight')}{suffix}", tensor
    model.quant_cache.require_finite()


def _gathered(gather: Callable | None, parameter: nn.Parameter, read: Callable):
    if gather is None:
        return read()
    with gather([parameter]):
        return read()
