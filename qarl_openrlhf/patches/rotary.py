"""transformers' rotary frequencies under DeepSpeed's ``zero.Init``.

``zero.Init`` makes every float tensor that a model creates in the model's dtype, so a BF16 model loaded under ZeRO-3 has its
rotary ``inv_freq`` rounded to BF16. The angle error grows with the position (an angle of 1000 rad is off by up to 2): the learner
then silently computes another function than the engine, and than itself under ZeRO-2.
"""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def restore_frequencies(model: nn.Module) -> int:
    """Recompute in float32 every rotary ``inv_freq`` of ``model`` that is not; returns how many.

    ``TypeError`` for a rotary module that is not built like transformers' own.
    """
    restored = 0
    for name, module in model.named_modules():
        frequencies = getattr(module, "inv_freq", None)
        if not isinstance(frequencies, torch.Tensor) or frequencies.dtype == torch.float32:
            continue
        kind = getattr(module, "rope_type", None)
        compute = getattr(module, "compute_default_rope_parameters", None) if kind == "default" else ROPE_INIT_FUNCTIONS.get(kind)
        if compute is None:
            raise TypeError(
                f"{name} ({type(module).__name__}) has its rotary frequencies in {frequencies.dtype}, and how to recompute them "
                "is not known; use ZeRO stage 1 or 2, which keep them in float32"
            )
        with torch.no_grad():
            exact, _ = compute(module.config, torch.device("cpu"))
            exact = exact.to(device=frequencies.device, dtype=torch.float32)
            module.inv_freq = nn.Buffer(exact, persistent=False)
            if hasattr(module, "original_inv_freq"):
                module.original_inv_freq = nn.Buffer(exact.clone(), persistent=False)
        restored += 1
    return restored
