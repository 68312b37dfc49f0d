"""transformers 5 loads a model under ZeRO-3 once, not once a process.

integrations/deepspeed.py:439 `_load_state_dict_into_zero3_model`: every rank reads the whole checkpoint and, of a mixture of
experts, stacks all experts' weights in main memory, though only rank 0's tensors are used: with eight ranks of Qwen3-30B-A3B that is
460 GB before anything is trained. Here the other ranks' tensors have a shape and no memory; persistent buffers, which each rank
loads for itself, are kept.
"""

import torch
import torch.distributed as dist

from qarl_openrlhf.patches.replacing import original, replace
from qarl_openrlhf.patches.versions import require_version


def apply() -> None:
    require_version("transformers")
    from transformers import modeling_utils

    load = original(modeling_utils, "_load_state_dict_into_zero3_model")
    if getattr(load, "_qarl", False):
        return

    def load_once(model, state_dict, *args, **kwargs):
        if dist.is_initialized() and dist.get_rank() > 0:
            state_dict = shapes_only(model, state_dict)
        return load(model, state_dict, *args, **kwargs)

    load_once._qarl = True
    replace(modeling_utils, "_load_state_dict_into_zero3_model", load_once)


def shapes_only(model: torch.nn.Module, state_dict: dict) -> dict:
    """The same names; of everything but buffers a tensor without memory. A buffer's name may lack the base model's prefix."""
    buffers = {name for name, _ in model.named_buffers()}
    buffers |= {name.removeprefix(f"{model.base_model_prefix}.") for name in buffers}
    return {name: tensor if name in buffers else tensor.to("meta") for name, tensor in state_dict.items()}
