"""OpenRLHF without flash-attn.

``openrlhf.models.ring_attn_utils`` imports four padding helpers and one collective from flash-attn at import time, so that
OpenRLHF cannot even be imported without it. They are a few lines of PyTorch. The stand-in modules exist only while
``openrlhf.models`` is being imported: left in ``sys.modules`` they would make vLLM and transformers believe that
flash-attn is installed.
"""

import importlib.util
import sys
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from qarl_openrlhf.patches.versions import require_version


def apply() -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        return
    require_version("openrlhf")
    # What these libraries find out about flash-attn must be the truth: import them before the stand-ins exist.
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers.modeling_flash_attention_utils  # noqa: F401

    with _stand_ins():
        import openrlhf.models  # noqa: F401


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows ``indices`` of ``x`` [total, ...]."""
    return x[indices]


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor):
    """[B, S, ...] and mask [B, S] -> (tokens [total, ...], flat indices, cu_seqlens int32 [B+1], longest, lengths [B])."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    cu_seqlens = F.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Inverse of ``unpad_input``: [total, ...] -> [batch, seqlen, ...], zeros where there was padding."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def all_gather(x: torch.Tensor, group) -> torch.Tensor:
    """Concatenate ``x`` of all ranks along dim 0."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


@contextmanager
def _stand_ins():
    from einops import rearrange, repeat

    members = {
        "flash_attn": {},
        "flash_attn.bert_padding": dict(
            index_first_axis=index_first_axis,
            unpad_input=unpad_input,
            pad_input=pad_input,
            rearrange=rearrange,
            repeat=repeat,
        ),
        "flash_attn.utils": {},
        "flash_attn.utils.distributed": dict(all_gather=all_gather),
    }
    for name, attributes in members.items():
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None, is_package=True)
        module.__path__ = []
        module.__dict__.update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in members:
            sys.modules.pop(name, None)
