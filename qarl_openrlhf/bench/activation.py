"""act_quant: per-token quantization of activations."""

from collections.abc import Iterator

import torch

from qarl_openrlhf.bench.shapes import MODELS
from qarl_openrlhf.bench.timing import copy_gb_s, copy_job, times_us
from qarl_openrlhf.kernels import act_quant


def run(models: list[str]) -> Iterator[dict]:
    """One row a (width, rows, format)."""
    copy_rate = copy_gb_s()
    for k in sorted({linear.k for model in models for linear in MODELS[model]}):
        for m in (1024, 4096, 16384):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            jobs = {name: lambda fp8=fp8: act_quant.act_quant(x, fp8) for name, fp8 in (("int8", False), ("fp8", True))}
            measured = times_us({**jobs, "copy": copy_job(3 * x.numel())})
            for name in jobs:
                rate = 3 * x.numel() / measured[name] / 1e3
                yield {
                    "what": f"act_quant {name}", "m": m, "k": k, "us": measured[name], "gb_s": rate,
                    "of_peak_copy": rate / copy_rate, "of_copy_of_same_size": measured["copy"] / measured[name],
                }  # fmt: skip
