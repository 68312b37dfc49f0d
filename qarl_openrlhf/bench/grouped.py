"""One MoE layer's experts (gate_up and down of Qwen3-30B-A3B), forward and backward, every scheme beside torch._grouped_mm."""

from collections.abc import Iterator

import torch

from qarl_openrlhf.bench.forward import MICRO_BATCHES
from qarl_openrlhf.bench.shapes import Experts
from qarl_openrlhf.bench.timing import peak_mib, times_us
from qarl_openrlhf.kernels import cuda, dispatch, grouped
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.packing import quantize_with_copy


def run(models: list[str]) -> Iterator[dict]:
    """Rows for the two products of a layer, then their sum; uneven random loads, as a router gives."""
    shape = Experts()
    for tokens in (4096, 16384):
        sums: dict[str, float] = {}
        loads = torch.multinomial(torch.rand(shape.experts) + 0.5, tokens * shape.active, replacement=True)
        ends = torch.bincount(loads, minlength=shape.experts).cumsum(0).to(torch.int32).cuda()
        for layer, k, n in (
            ("gate_up", shape.hidden, 2 * shape.intermediate),
            ("down", shape.intermediate, shape.hidden),
        ):
            row = _product(tokens * shape.active, k, n, shape.experts, ends)
            yield {"tokens": tokens, "layer": layer, "n": n, "k": k, **row}
            for key, value in row.items():
                sums[key] = sums.get(key, 0.0) + value
        ratios = {key.removesuffix(" us"): value / sums["bf16 us"] for key, value in sums.items() if key.endswith(" us")}
        amortised = (sums["w4a16 us"] + sums["quantize int4 + copy us"] / MICRO_BATCHES) / sums["bf16 us"]
        yield {
            "tokens": tokens, "layer": "both", **sums,
            **{f"{path} / bf16": ratio for path, ratio in ratios.items()},
            f"w4a16 with quantization over {MICRO_BATCHES} / bf16": amortised,
            "w4a16 with quantization each time / bf16": (sums["w4a16 us"] + sums["quantize int4 + copy us"]) / sums["bf16 us"],
        }  # fmt: skip


def _product(t: int, k: int, n: int, e: int, ends) -> dict[str, float]:
    x = torch.randn(t, k, device="cuda", dtype=torch.bfloat16)
    w = (torch.randn(e, n, k, device="cuda") * 0.02).bfloat16()
    dy = torch.randn(t, n, device="cuda", dtype=torch.bfloat16)
    jobs = {"bf16": lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)}
    keep = []  # the lambdas below read packed weights that must outlive the loop
    for name in ("w4a16", "fp8", "w8a8", "w4a8"):
        packed, copy = quantize_with_copy(w, QuantScheme.parse(name), name="experts", copy=name == "w4a16", check=False)
        if name == "w4a8":
            copy = dispatch.weight_operand(packed, torch.bfloat16)
        keep.append((packed, copy))
        jobs[name] = lambda packed=packed, copy=copy: _forward(x, packed, copy, ends)
    jobs["w4a16 packed"] = lambda: _forward(x, keep[0][0], None, ends)
    jobs["quantize int4"] = lambda: dispatch.quantize(w, "int4", 128)
    jobs["quantize int4 + copy"] = lambda: dispatch.quantize(w, "int4", 128, copy=True)
    jobs["backward"] = lambda: grouped.backward(dy, x, w, ends, (True, True), torch.bfloat16)
    row = {f"{name} us": us for name, us in times_us(jobs, repeats=9, graph=False).items()}
    return row | {f"{name} peak MiB": peak_mib(jobs[name]) for name in ("bf16", "w4a16", "w4a16 packed", "fp8", "w8a8")}


def _forward(x, packed, copy, ends):
    cuda._shared = None
    return grouped.forward(x, packed, copy, ends)
