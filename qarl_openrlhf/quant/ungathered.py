"""ZeRO-3 forwards without gradients that leave in its shards what they do not read: the BF16 weights of packed layers.

DeepSpeed gathers all parameters of a module before its forward. A layer whose quantized weight is in the cache reads that one; the
parameter is asked for its gradient only, in passes that have one (autograd wants it in its whole shape). In the others, the old
log-probs of a rollout and the probe of a push, gathering is all that ZeRO-3 adds to ZeRO-2's forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch import nn

from qarl_openrlhf.quant.convert import quantized_layers
from qarl_openrlhf.quant.linear import QuantLinear


def unread(network: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name of its parameter) of each layer of a converted model whose forward would read packed weights at hand."""
    forced = network.quant_cache.quantized_forward
    layers = [layer for layer in quantized_layers(network).values() if (layer.scheme.aligned or forced) and layer.is_packed()]
    return [(layer, "weight") if isinstance(layer, QuantLinear) else (layer.module, layer.attribute) for layer in layers]


@contextmanager
def ungathered(engine, network: nn.Module) -> Iterator[int]:
    """Within it, forwards of ``network`` gather what they read. Yields how many parameters stay away.

    engine: what DeepSpeed made of the network. Without ZeRO-3 nothing changes. All ranks enter it together, without gradients, and
    no weight changes meanwhile.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("ungathered: a forward with gradients needs every parameter in its whole shape; enter it under torch.no_grad()")
    zero = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    away = [] if zero is None else unread(network)
    if not away:
        yield 0
        return
    coordinator = zero.param_coordinator
    # DeepSpeed fetches ahead by the order of parameters that it has seen, and ends the process at another one: these passes have
    # an order of their own, and the training passes keep theirs.
    own = copy(coordinator)
    own._clear_trace_structures() if own.is_invalid_trace() else own._invalidate_trace()
    zero.param_coordinator = own
    orders = {module: list(module._parameters) for module, _ in away}
    for module, name in away:  # DeepSpeed's hooks go by a module's parameters; its forward finds an attribute just as well
        module.__dict__[name] = module._parameters.pop(name)
    try:
        yield len(away)
    finally:
        for module, name in away:
            module._parameters[name] = module.__dict__.pop(name)
        for module, order in orders.items():
            for name in order:
                module._parameters.move_to_end(name)
        zero.param_coordinator = coordinator
