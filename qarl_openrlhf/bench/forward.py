"""The learner's forward product of each scheme, activation quantization included, beside the library's BF16 product."""

from collections.abc import Iterator

import torch

from qarl_openrlhf.bench.shapes import MODELS, ROWS
from qarl_openrlhf.bench.timing import peak_mib, times_us
from qarl_openrlhf.kernels import cuda, dispatch
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.packing import quantize_with_copy

MICRO_BATCHES = 8  # forwards that share one quantization of the weight


def run(models: list[str]) -> Iterator[dict]:
    """One row a (shape, rows): microseconds of each path, and its ratio to BF16 with its share of the quantization."""
    for model in models:
        for linear in MODELS[model]:
            w = (torch.randn(linear.n, linear.k, device="cuda") * 0.02).bfloat16()
            packed, copies, quantizing = {}, {}, {}
            for name in ("w4a16", "fp8", "w8a8", "w4a8"):
                packed[name], copies[name] = quantize_with_copy(
                    w, QuantScheme.parse(name), name=linear.layer, copy=name == "w4a16", check=False
                )
                for copy in (False, True):
                    quantizing[name, copy] = _quantize_us(w, name, copy)
            operand = dispatch.weight_operand(packed["w4a8"], torch.bfloat16)
            for m in ROWS:
                x = torch.randn(m, linear.k, device="cuda", dtype=torch.bfloat16)
                jobs = {
                    "bf16": lambda: x @ w.t(),
                    "w4a16 dequant": lambda: _forward(x, packed["w4a16"], copies["w4a16"]),
                    "w4a16 packed": lambda: _forward(x, packed["w4a16"], None),
                    "fp8": lambda: _forward(x, packed["fp8"], None),
                    "w8a8": lambda: _forward(x, packed["w8a8"], None),
                    "w4a8 dequant": lambda: _forward(x, packed["w4a8"], operand),
                    "int8 library product only": lambda: _int_mm(packed["w8a8"].weight, max(m, 32), linear.k),
                }
                us = times_us(jobs, repeats=9)
                row = {"model": model, "layer": linear.layer, "n": linear.n, "k": linear.k, "m": m}
                for path in jobs:
                    row[f"{path} us"] = us[path]
                for path, key in _QUANTIZING.items():
                    row[f"{path} / bf16"] = (us[path] + quantizing[key] / MICRO_BATCHES) / us["bf16"]
                if m == ROWS[-1]:
                    row |= {f"{path} peak MiB": peak_mib(job) for path, job in jobs.items() if "library" not in path}
                yield row


_QUANTIZING = {
    "w4a16 dequant": ("w4a16", True),
    "w4a16 packed": ("w4a16", False),
    "fp8": ("fp8", False),
    "w8a8": ("w8a8", False),
    "w4a8 dequant": ("w4a8", False),
}
_codes: dict[tuple, torch.Tensor] = {}


def _forward(x, packed, copy):
    cuda._shared = None  # each repeat quantizes its activations
    return dispatch.quantized_linear(x, packed, copy, None, packed.scheme)


def _int_mm(w, m, k):
    if (m, k) not in _codes:
        _codes.clear()
        _codes[m, k] = torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8)
    return torch._int_mm(_codes[m, k], w.t())


def _quantize_us(w, name, copy):
    scheme = QuantScheme.parse(name)
    job = lambda: dispatch.quantize(w, scheme.weight_format, scheme.group_size, engine_grid=name == "w4a8", copy=copy)  # noqa: E731
    return times_us({"quantize": job}, repeats=7)["quantize"]
