"""Do learner and engine send the same tokens to the same experts?

A router's top-k is not continuous: where two experts are almost equally likely, rounding chooses the other one, and the token's
log-probs jump. ``mismatch/router_topk_agreement`` is the share of chosen experts that both chose, on the probe's text.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qarl_openrlhf.quant.experts import routers


@contextmanager
def recorded_experts(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Within it each forward of ``model`` leaves layer number -> expert ids int64 [T, k]; nothing for a dense model."""
    chosen: dict[int, Tensor] = {}
    hooks = []
    for name, router in routers(model).items():
        layer = int(re.search(r"(?:^|\.)layers\.(\d+)\.", name)[1])

        def record(_module, _args, output, layer=layer):
            chosen[layer] = output[2].detach()

        hooks.append(router.register_forward_hook(record))
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def topk_agreement(mine: dict[int, Tensor], theirs: Tensor) -> float:
    """Share of the learner's chosen experts that the engine chose, too: of all tokens and layers, whatever the order.

    mine: layer -> [T, k]; theirs: [at least T, layers, k].
    """
    both = total = 0
    for layer, ids in mine.items():
        other = theirs[: ids.shape[0], layer].to(torch.int64)
        both += int((ids.cpu().unsqueeze(-1) == other.unsqueeze(-2)).any(-1).sum())
        total += ids.numel()
    return both / total
