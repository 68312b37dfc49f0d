"""What is mended in other packages, one subject a file: most packages have one, OpenRLHF two, vLLM several.

Each patch names the place it mends and the reason. It refuses modules that lack a name it needs and, where it was written for one
version's code, other versions (``PatchError``): a patch applied to code it has not seen is how silent corruption starts. A change that
is one half of something of ours is made beside the other half (docs/architecture.md lists them).

``apply()`` is idempotent and is called when ``qarl_openrlhf.actors`` is imported, so the driver and every learner get the
same ones. An engine's process (``qarl_openrlhf.engine.actor``) has those of ``torch_cuda`` and, by the plugin, of ``vllm`` alone.
"""

from qarl_openrlhf.imports import uncollected
from qarl_openrlhf.patches.versions import PatchError, require_version

__all__ = ["PatchError", "apply", "require_version"]

_applied = False


def apply() -> None:
    """Apply all patches that this process needs (importing OpenRLHF on the way). Later calls do nothing."""
    global _applied
    if _applied:
        return
    with uncollected():
        from qarl_openrlhf.patches import deepspeed, flash_attn, openrlhf, torch_cuda

        torch_cuda.apply()
        deepspeed.apply()
        flash_attn.apply()
        openrlhf.apply()
    _applied = True
