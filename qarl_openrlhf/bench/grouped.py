"""One MoE layer's experts (gate_up and down of Qwen3-30B-A3B), forward and backward, every scheme beside torch._grouped_mm.

Then the whole block around the products, fused and as its torch reference, and each fused kernel with the bytes it moves.
"""

from collections.abc import Callable, Iterator

import torch

from qarl_openrlhf.bench.forward import MICRO_BATCHES
from qarl_openrlhf.bench.shapes import Experts
from qarl_openrlhf.bench.timing import copy_gb_s, peak_mib, times_us
from qarl_openrlhf.kernels import cuda, dispatch, grouped, moe, moe_fused
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.packing import quantize_with_copy


def run(models: list[str]) -> Iterator[dict]:
    """Rows for the two products of a layer, their sum, and the block; uneven random loads, as a router gives."""
    shape = Experts()
    copy = copy_gb_s()
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
        ids = loads.view(tokens, shape.active).cuda()
        yield {"tokens": tokens, "layer": "block", **_block(ids, shape, sums["bf16 us"], sums["backward us"])}
        yield {"tokens": tokens, "layer": "block's kernels", "copy GB/s": copy, **_kernels(ids, shape)}


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


def _block(ids, shape: Experts, products: float, products_backward: float) -> dict[str, float]:
    """The block with BF16 products, fused beside torch; "rest" is what the products alone (as timed before) leave."""
    tokens = ids.shape[0]
    x, dout = (torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gate_up = (torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden, device="cuda") * 0.02).bfloat16()
    down = (torch.randn(shape.experts, shape.hidden, shape.intermediate, device="cuda") * 0.02).bfloat16()
    weights = torch.rand(tokens, shape.active, device="cuda")
    leaves = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down)]

    def forward():
        by_gate_up, by_down = (lambda rows, ends, w=w: grouped.GroupedPlain.apply(rows, w, ends) for w in (gate_up, down))
        return moe.experts_mlp(x, ids, weights, by_gate_up, by_down, shape.experts)

    jobs = {}
    for arm, kernel in (("fused", "auto"), ("torch", "torch")):  # the products of a plain weight are the same in both
        jobs[f"forward {arm}"] = _with(kernel, torch.no_grad()(forward))
        jobs[f"forward + backward {arm}"] = _with(kernel, lambda: torch.autograd.grad(forward(), leaves, dout))
    us = times_us(jobs, repeats=9, graph=False)
    row = {f"{name} us": value for name, value in us.items()}
    for name, alone in (("forward", products), ("forward + backward", products + products_backward)):
        row[f"{name} fused / torch"] = us[f"{name} fused"] / us[f"{name} torch"]
        row |= {f"{name} rest {arm} us": us[f"{name} {arm}"] - alone for arm in ("fused", "torch")}
    return row | {f"{name} peak MiB": peak_mib(job) for name, job in jobs.items()}


def _with(kernel: str, job: Callable) -> Callable:
    def run():
        dispatch.set_kernel(kernel)
        try:
            return job()
        finally:
            dispatch.set_kernel("auto")

    return run


def _kernels(ids, shape: Experts) -> dict[str, float]:
    """Microseconds and GB/s of each fused kernel on its own, and of the sort beside the one with wide keys."""
    (tokens, k), h, i = ids.shape, shape.hidden, shape.intermediate
    _, inverse, _ = moe.sort_by_expert(ids, shape.experts)
    x, y = (torch.randn(rows, h, device="cuda", dtype=torch.bfloat16) for rows in (tokens, tokens * k))
    gate_up = torch.randn(tokens * k, 2 * i, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, k, device="cuda")
    dh = gate_up[:, :i].contiguous()
    one, wide = 2 * tokens * h, 2 * tokens * k * h  # bytes of the tokens' rows, and of the sorted rows
    moved = {
        "spread": (lambda: moe_fused.spread(x, inverse, k), one + wide),
        "silu_mul": (lambda: moe_fused.silu_mul(gate_up), 6 * tokens * k * i),
        "weighted collect": (lambda: moe_fused.collect(y, inverse, weights, k), one + wide),
        "combine_backward": (lambda: moe_fused.combine_backward(x, y, inverse, weights), one + 2 * wide),
        "silu_mul_backward": (lambda: moe_fused.silu_mul_backward(dh, gate_up), 10 * tokens * k * i),
        "collect": (lambda: moe_fused.collect(y, inverse, None, k), one + wide),
    }
    us = times_us({name: job for name, (job, _) in moved.items()}, repeats=9)
    row = {f"{name} us": value for name, value in us.items()}
    row |= {f"{name} GB/s": moved[name][1] / us[name] / 1e3 for name in moved}
    sorts = {
        "sort": lambda: moe.sort_by_expert(ids, shape.experts),
        "sort by int64, inverse by argsort": lambda: ids.flatten().sort(stable=True).indices.argsort(),
    }
    return row | {f"{name} us": value for name, value in times_us(sorts, repeats=9, graph=False).items()}
