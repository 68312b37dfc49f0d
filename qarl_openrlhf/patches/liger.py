"""Liger for Qwen3-MoE (liger-kernel 0.8.5): its norms and rotary positions, not its experts.

Liger's default replaces the experts, which ``quant.experts`` computes itself, and the model's forward, which returns what
OpenRLHF reads the routers' losses from. What it then runs in their places is an argument that OpenRLHF does not pass.
"""

from functools import partial

from qarl_openrlhf.patches.replacing import original, replace
from qarl_openrlhf.patches.versions import require_version

FAMILIES = ("qwen3_moe",)


def keep_experts(args) -> None:
    """Before a model is made under ``--ds.use_liger_kernel``; does nothing without the flag. May be called any number of times."""
    if not args.ds.use_liger_kernel:
        return
    require_version("liger-kernel")
    from liger_kernel.transformers import monkey_patch

    known = original(monkey_patch, "MODEL_TYPE_TO_APPLY_LIGER_FN")
    for family in FAMILIES:
        function = original(known, family, monkey_patch)
        if not isinstance(function, partial):
            replace(known, family, partial(function, swiglu=False, fused_linear_cross_entropy=False), monkey_patch)
