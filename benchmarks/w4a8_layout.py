"""W4A8 weights and scales into CUTLASS's layout: vLLM's own functions beside ours (patches/vllm_w4a8.py), milliseconds a tensor.

    python benchmarks/w4a8_layout.py | tee benchmarks/results/w4a8_layout_h200.txt

The tensors of a layer of Qwen3-8B, fused as vLLM has them, and of the experts of a layer of Qwen3-30B-A3B. Needs a Hopper card and vLLM for it.
"""

import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from vllm import _custom_ops  # noqa: F401  loads vLLM's compiled functions
from vllm.model_executor.layers.quantization.utils.quant_utils import convert_packed_uint4b8_to_signed_int4_inplace as signed

from qarl_openrlhf.patches import vllm_w4a8

DENSE = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
EXPERTS = {"gate_up of 128 experts": (128, 1536, 2048), "down of 128 experts": (128, 2048, 768)}


def ms(call: Callable, repeats: int) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def line(name: str, times: dict[str, tuple[float, float]]) -> None:
    print(f"{name:24}" + "".join(f"  {what} {theirs:8.2f} {ours:6.3f}" for what, (theirs, ours) in times.items()), flush=True)


def main() -> None:
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, vllm {version('vllm')}: vLLM's, ours")
    vllms = torch.ops._C
    for name, (n, k) in DENSE.items():
        codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda").t()
        scales = (torch.rand(k // 128, n, device="cuda") * 50).to(torch.float8_e4m3fn)
        assert torch.equal(vllm_w4a8.reorder(codes), vllms.cutlass_encode_and_reorder_int4b(codes))
        line(name, {
            "order": (ms(lambda: vllms.cutlass_encode_and_reorder_int4b(codes), 5), ms(lambda: vllm_w4a8.reorder(codes), 5)),
            "scales": (ms(lambda: vllms.cutlass_pack_scale_fp8(scales), 2), ms(lambda: vllm_w4a8.pack_scales(scales), 5)),
            "signs": (ms(lambda: signed(codes), 5), ms(lambda: vllm_w4a8.make_signed(codes), 5)),
        })  # fmt: skip
    for name, (experts, n, k) in EXPERTS.items():
        codes = torch.randint(-(2**31), 2**31 - 1, (experts, n, k // 8), dtype=torch.int32, device="cuda")
        scales = (torch.rand(experts, k // 128, n, device="cuda") * 50).to(torch.float8_e4m3fn)
        line(name, {
            "order": (ms(lambda: vllms.cutlass_encode_and_reorder_int4b_grouped(codes), 2), ms(lambda: vllm_w4a8.reorder_experts(codes), 5)),
            "scales": (ms(lambda: vllms.cutlass_pack_scale_fp8(scales), 1), ms(lambda: vllm_w4a8.pack_scales(scales), 5)),
        })  # fmt: skip


if __name__ == "__main__":
    main()
