"""w4a16_gemm for few rows, beside the library's BF16 product and its int4 product (another packing, other scales)."""

from collections.abc import Iterator

import torch

from qarl_openrlhf.bench.shapes import MODELS
from qarl_openrlhf.bench.timing import times_us
from qarl_openrlhf.kernels import quantize_pack
from qarl_openrlhf.kernels.w4a16_gemm import w4a16_gemm


def run(models: list[str]) -> Iterator[dict]:
    """One row a (shape, rows)."""
    for model in models:
        for linear in MODELS[model]:
            n, k = linear.n, linear.k
            w = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
            packed, scales, _ = quantize_pack.quantize_int4(w, 128, False)
            tiny = torch._convert_weight_to_int4pack(torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8), 8)
            tiny_scales = torch.randn(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)
            for m in (1, 16, 64):
                x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                us = times_us(
                    {
                        "bf16": lambda: x @ w.t(),
                        "w4a16_gemm": lambda: w4a16_gemm(x, packed, scales, None),
                        "library int4": lambda: torch._weight_int4pack_mm(x, tiny, 128, tiny_scales),
                    },
                    repeats=31,
                )
                bytes_read = w.numel() * (0.5 + 2 / 128)
                yield {
                    "model": model, "layer": linear.layer, "n": n, "k": k, "m": m, **{f"{p} us": t for p, t in us.items()},
                    "bf16 / w4a16_gemm": us["bf16"] / us["w4a16_gemm"], "gb_s": bytes_read / us["w4a16_gemm"] / 1e3,
                }  # fmt: skip
