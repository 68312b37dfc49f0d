"""Turn a Hugging Face model into a quantized learner in place, and list what it publishes.

Quantized: every nn.Linear and every stacked expert weight inside the decoder layers. Never quantized: embeddings, lm_head,
norms, biases, MoE router gates.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qarl_openrlhf.quant import experts
from qarl_openrlhf.quant.cache import QuantCache
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.linear import QuantLinear
from qarl_openrlhf.quant.names import DECODER_LAYER, PROJECTIONS, ROUTER_GATES
from qarl_openrlhf.quant.scheme import QuantScheme


class LayerPlan(NamedTuple):
    """What happens to one linear layer or one stacked expert weight; scheme None: left unquantized, for ``reason``.

    experts: how many weights [out_features, in_features] it holds (1 for a linear layer).
    """

    name: str
    out_features: int
    in_features: int
    scheme: QuantScheme | None
    reason: str
    experts: int = 1


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
            (p.name, str(count), _shape(p), str(p.scheme or "-"), p.reason) for p, count in kinds.items()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows]
        weights = sum(p.experts * p.out_features * p.in_features for p in self.quantized)
        lines.append(
            f"{len(self.quantized)} of {len(self.layers)} linear layers in {self.scheme} "
            f"({weights / 1e6:.1f} M weights), cache {self.cache_mode}"
        )
        return "\n".join(lines)


def convert_model(
    model: nn.Module, scheme: QuantScheme, *, cache: str = "packed", skip: tuple[str, ...] = (), tp: int = 1, device: str | None = None
) -> ConversionReport:
    """Swap every nn.Linear of a decoder model for a :class:`QuantLinear`, and attach a
    :class:`~qarl_openrlhf.quant.experts.QuantExperts` to every block of fused experts; sets ``model.quant_cache``.

    cache: ``packed``, ``dequant`` or ``none``. skip: names or fnmatch patterns of layers to leave unquantized. tp: the
    engine's tensor-parallel size, which decides whether the groups fit. device: "cuda" or "cpu" of the run, see ``check_layer``. Works on meta and ZeRO-3 partitioned parameters.
    QuantError, before anything is changed, for a layer that cannot run the scheme, and for a model that is converted already.
    """
    if hasattr(model, "quant_cache"):
        raise QuantError(f"this {type(model).__name__} is converted already: load the model anew for {scheme}")
    if isinstance(skip, str):  # its letters would be taken for patterns, "*" for all layers
        raise QuantError(f"skip={skip!r} is a string: give a tuple of names or patterns, ({skip!r},)")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    blocks = experts.expert_modules(model)
    plans = []
    for name, module in model.named_modules():
        if name in linears:
            plans.append(_plan(name, module.weight, scheme, skip))
        elif name in blocks:
            weights = {p: getattr(module, p, None) for p in PROJECTIONS}
            plans += [_plan(f"{name}.{p}", w, scheme, skip) for p, w in weights.items() if _dimensions(w) == 3]
    for plan in plans:
        if plan.scheme is not None:
            if plan.name in linears:
                QuantLinear.check(linears[plan.name], plan.name)
            else:
                block = plan.name.rpartition(".")[0]
                experts.check(blocks[block], block)
            scheme.check_layer(plan.name, plan.out_features, plan.in_features, tp, device)
    if scheme.quantized:
        if not any(plan.scheme for plan in plans):
            raise QuantError(f"{type(model).__name__} has no nn.Linear in a `layers.N.` module: nothing to run {scheme} on")
        _refuse_other_experts(model, scheme, {plan.name for plan in plans}, skip)
    quant_cache = QuantCache(cache)
    for plan in plans:
        linear = linears.get(plan.name)
        if type(linear) is nn.Linear:  # other classes (LoRA, 4-bit) keep their own product
            QuantLinear.convert(linear, plan.scheme, name=plan.name, cache=quant_cache)
    _attach_experts(blocks, {plan.name: plan.scheme for plan in plans}, quant_cache)
    if blocks:
        experts.keep_routing_weights_in_float32(model)
    model.quant_cache = quant_cache
    return ConversionReport(scheme, cache, plans)


def _attach_experts(blocks: dict[str, nn.Module], schemes: dict[str, QuantScheme | None], cache: QuantCache) -> None:
    for name, block in blocks.items():
        if experts.problem(block) is None:  # else nothing of it is quantized: transformers' own product stays
            experts.attach(block, {p: schemes[f"{name}.{p}"] for p in PROJECTIONS}, name=name, cache=cache)


def _plan(name: str, weight: Tensor, scheme: QuantScheme, skip: tuple[str, ...]) -> LayerPlan:
    *stacked, n, k = getattr(weight, "ds_shape", weight.shape)
    count = stacked[0] if stacked else 1
    if not scheme.quantized:
        reason = "bf16"
    elif not DECODER_LAYER.search(name):
        reason = "outside the decoder layers"
    elif name.rsplit(".", 1)[-1] in ROUTER_GATES:
        reason = "router gate"
    elif any(fnmatchcase(name, pattern) for pattern in skip):
        reason = "skipped by name"
    else:
        return LayerPlan(name, n, k, scheme, "engine only" if scheme.rollout_only else "", count)
    return LayerPlan(name, n, k, None, reason, count)


def _dimensions(weight: Tensor | None) -> int:
    return 0 if weight is None else len(getattr(weight, "ds_shape", weight.shape))


def _shape(plan: LayerPlan) -> str:
    experts = f"{plan.experts} x " if plan.experts > 1 else ""
    return f"{experts}[{plan.out_features}, {plan.in_features}]"


def _refuse_other_experts(model: nn.Module, scheme: QuantScheme, planned: set[str], skip: tuple[str, ...]) -> None:
    # Leaving stacked weights that we do not know in BF16 would be silent misalignment.
    for name, parameter in model.named_parameters():
        known = name in planned or any(fnmatchcase(name, p) for p in skip)
        if _dimensions(parameter) == 3 and DECODER_LAYER.search(name) and not known:
            shape = list(getattr(parameter, "ds_shape", parameter.shape))
            raise QuantError(
                f"{name} {shape}: fused MoE experts like these cannot run {scheme}; those of Qwen3-MoE (gate_up_proj, "
                "down_proj) can: use such a model, a dense one, or bf16"
            )


def quantized_layers(model: nn.Module) -> dict[str, QuantLinear | experts.ExpertWeight]:
    """Layer name -> what holds its packed weight (``packed``, ``is_packed``, ``weight``, ``scheme``), of a converted model.

    A stacked expert weight is one layer, named as its parameter: ``model.layers.0.mlp.experts.gate_up_proj``.
    """
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and module.scheme:
            layers[name] = module
        elif hasattr(module, "quant_experts"):
            layers |= {weight.name: weight for weight in module.quant_experts.weights.values() if weight.scheme}
    return layers


@torch.no_grad()
def published_tensors(
    model: nn.Module, scheme: QuantScheme, *, gather: Callable | None = None, only: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything an engine or a checkpoint needs, in model order.

    Names are the checkpoint's, except that experts stay stacked (see :mod:`qarl_openrlhf.quant.expert_names`). Quantized
    layers give their packed tensors (``<layer>.weight_packed`` and so on), each other parameter itself; a tied
    lm_head comes once, under the embedding's name. gather: ``deepspeed.zero.GatheredParameters`` under ZeRO-3 (then every
    rank must exhaust the iterator); layers that the cache holds are not gathered. only: names of parameters, of a model that is
    published in parts; whoever does so calls ``model.quant_cache.require_finite()`` after the last. QuantError for a model that
    was not converted for ``scheme``.
    """
    if not hasattr(model, "quant_cache"):
        raise QuantError(f"this {type(model).__name__} is not converted: call convert_model(model, scheme) first, for bf16, too")
    layers = quantized_layers(model)
    made_for = {layer.scheme for layer in layers.values()}
    parameters = {f"{name}.weight" if isinstance(layer, QuantLinear) else name: name for name, layer in layers.items()}
    if made_for != ({scheme} if scheme.quantized else set()):
        raise QuantError(f"the model was converted for {[str(s) for s in made_for] or 'no scheme'}, not for {scheme}")
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        if name not in parameters:
            yield name, _gathered(gather, parameter, parameter.detach)
            continue
        layer = layers[parameters[name]]
        packed = layer.packed() if layer.is_packed() else _gathered(gather, parameter, layer.packed)
        for suffix, tensor in packed.tensors().items():
            yield f"{parameters[name]}.{suffix}", tensor
    if only is None:
        model.quant_cache.require_finite()


def _gathered(gather: Callable | None, parameter: nn.Parameter, read: Callable):
    if gather is None:
        return read()
    with gather([parameter]):
        return read()
