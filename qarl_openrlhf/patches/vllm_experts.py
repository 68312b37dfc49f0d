"""vLLM 0.26 to 0.29 on a GPU: 4-bit experts into Marlin's layout, all experts of a layer at once, and with the right scales.

A push brings every layer's experts into the kernel's layout. vLLM does that expert by expert: for 48 layers of 128 experts some
37 thousand launches, most of the 1.1 s that a push of Qwen3-30B-A3B spends in loading. Expert tensors are contiguous and both
steps move values within tiles that no two experts share, so that one call on all of them gives the same bytes.

And for gate and up vLLM chooses the permutation of the scales by the intermediate size, which is not the size their groups
divide (int_wna16.py, ``size_k=layer.intermediate_size_per_partition``): where a rank's share of an expert is one group, the scales
of the wrong columns are read. Here the number of groups decides.

Applied by the plugin (:mod:`qarl_openrlhf.patches.vllm`): exports are loaded (cli.evaluate, `vllm serve`) without any push.
"""

import torch
from torch import Tensor

from qarl_openrlhf.patches.replacing import replace


def apply() -> None:
    """Before a process of vLLM's loads or is pushed experts: an export is as wrong as a push without it. Any number of times."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    replace(int_wna16, "marlin_moe_permute_scales", permute_scales)
    replace(_custom_ops, "gptq_marlin_moe_repack", repack)


def permute_scales(s: Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False) -> Tensor:
    """In ``marlin_moe_permute_scales``' signature; s [E, groups, size_n]. ``size_k`` is not read."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms

    grouped, single = get_scale_perms()
    permutation = grouped if s.shape[1] > 1 and not is_a_8bit else single
    return s.reshape(-1, len(permutation))[:, permutation].reshape(s.shape).contiguous()


_checked: set[tuple] = set()


def repack(b_q_weight: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Tensor:
    """In ``gptq_marlin_moe_repack``'s signature: int32 [E, size_k * num_bits / 32, size_n] -> [E, size_k / 16, size_n * num_bits / 2].

    Experts follow each other along K, in whole tiles of 16 rows. The first call of a shape proves it on the first and the last
    expert: RuntimeError where one expert alone gives other bytes. perm: of an act-ordered checkpoint, which no scheme makes;
    then expert by expert, as in vLLM.
    """
    if size_k % 16:
        raise ValueError(f"experts of {size_k} input features: Marlin's tiles have 16")
    experts = b_q_weight.shape[0]

    def of(weight: Tensor, order: Tensor, rows: int) -> Tensor:
        return torch.ops._C.gptq_marlin_repack(weight, order, rows, size_n, num_bits, is_a_8bit)

    if perm.numel():
        return torch.stack([of(b_q_weight[e], perm[e], size_k) for e in range(experts)])
    weights = b_q_weight.contiguous()
    packed = of(weights.flatten(0, 1), perm[0], experts * size_k).view(experts, size_k // 16, size_n * (num_bits // 2))
    shape = (experts, size_k, size_n, num_bits, is_a_8bit)
    if shape not in _checked:
        for e in (0, experts - 1):
            if not torch.equal(packed[e], of(weights[e], perm[e], size_k)):
                raise RuntimeError(f"Marlin's layout of expert {e} of {experts} is another one alone than beside the others")
        _checked.add(shape)
    return packed
