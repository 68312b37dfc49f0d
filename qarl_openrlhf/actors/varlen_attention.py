"""Attention of packed batches without flash-attn: transformers' attention implementation "qarl_varlen".

A packed batch is one row [1, T] of sequences one after another; ``position_ids`` start again at 0 with each. On a GPU the product
is PyTorch's own variable-length flash attention (``torch.nn.attention.varlen``), elsewhere one causal attention a sequence.
Padded batches (those with an attention mask) take PyTorch's ``scaled_dot_product_attention``, as implementation "sdpa" does.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

NAME = "qarl_varlen"


def register() -> None:
    """Make the implementation known to transformers in this process."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def mask(*args, attention_mask: Tensor | None = None, **kwargs) -> Tensor | None:
    """None for packed batches, whose sequences are told apart by position; transformers' sdpa mask for padded ones."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, H_kv, T, D] -> [B, T, H, D]."""
    if attention_mask is not None or query.shape[0] > 1 or position_ids is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    bounds, longest = sequence_bounds(position_ids)
    if sliding_window is not None and longest > sliding_window:
        raise NotImplementedError(
            f"--ds.packing_samples without flash-attn has no sliding window ({sliding_window} < {longest} tokens): install flash-attn"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and varlen_attn is not None:
        return _on_card(q, k, v, bounds, longest, scaling)[None], None
    return _one_by_one(q, k, v, bounds.tolist(), scaling)[None], None


def sequence_bounds(position_ids: Tensor) -> tuple[Tensor, int]:
    """[1, T] positions -> (int32 [N + 1] first token of each sequence and the end, length of the longest).

    Kept on the tensor itself: all layers of a forward get the same one, and it takes the device's attention.
    """
    known = getattr(position_ids, "_qarl_bounds", None)
    if known is None:
        starts = (position_ids[0] == 0).nonzero()[:, 0]
        bounds = F.pad(starts, (0, 1), value=position_ids.shape[1]).to(torch.int32)
        known = position_ids._qarl_bounds = bounds, int(bounds.diff().max())
    return known


def _on_card(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scaling: float | None) -> Tensor:
    parameters = inspect.signature(varlen_attn).parameters
    options = {"scale": scaling} if "scale" in parameters else {}
    if "scale" not in parameters and scaling is not None:
        q = q * (scaling * q.shape[-1] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in parameters:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if "window_size" in parameters:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    return varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), bounds, bounds, longest, longest, **options)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scaling: float | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    parts = []
    for first, end in zip(bounds, bounds[1:]):
        one = (x[first:end].transpose(0, 1) for x in (q, k, v))  # [H, t, D]
        parts.append(F.scaled_dot_product_attention(*one, is_causal=True, scale=scaling).transpose(0, 1))
    return torch.cat(parts)
