"""torch.cuda calls that OpenRLHF makes without a guard, on a machine without CUDA.

OpenRLHF 0.11 calls ``current_device``, ``set_device``, ``synchronize``, ``empty_cache`` and ``current_stream`` all over its
actors. A CPU build of torch raises there. "cpu" is a valid target for every ``.to(current_device())``; the other calls
have nothing to do. Nothing is touched where CUDA is available.
"""

import torch

from qarl_openrlhf.patches.replacing import replace


def apply() -> None:
    if torch.cuda.is_available():
        return
    replace(torch.cuda, "current_device", lambda: "cpu")
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        replace(torch.cuda, name, _no_operation())


def _no_operation():
    """A new function each time: torch._dynamo refuses one object under two names."""
    return lambda *_args, **_kwargs: None
