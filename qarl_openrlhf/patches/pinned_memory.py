"""Large pinned buffers of the size that was asked for.

PyTorch rounds every pinned allocation up to the next power of two, so that it can be used again for another size. What a learner
keeps in main memory (master weights, gradients, an optimizer that sleeps) is a few buffers for the whole run: of an 8B model's
30.5 GiB of gradients 64 would be taken.
"""

import torch

SETTING = "pinned_max_round_threshold_mb"
LARGEST_ROUNDED = 64  # MiB


def keep_sizes() -> bool:
    """Ends the rounding of buffers above ``LARGEST_ROUNDED`` in this process; False where this PyTorch has no setting for it.

    Not for an engine: vLLM's sleep registers its own pinned buffers by their rounded size.
    """
    try:
        settings = [text for text in (torch._C._accelerator_getAllocatorSettings(),) if text]
        if not any(SETTING in text for text in settings):
            torch._C._accelerator_setAllocatorSettings(",".join([*settings, f"{SETTING}:{LARGEST_ROUNDED}"]))
    except (AttributeError, RuntimeError, ValueError):  # an older PyTorch, or an unknown key
        return False
    return True
