"""quantize_pack and dequantize: bytes moved over time, as a share of the copy bandwidth of the same run."""

from collections.abc import Callable, Iterator

import torch

from qarl_openrlhf.bench.shapes import MODELS
from qarl_openrlhf.bench.timing import copy_gb_s, copy_job, times_us
from qarl_openrlhf.kernels import dequantize, quantize_pack
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.cache import QuantCache

# bytes a weight: read, codes, scales, and the copy
_FORMATS: dict[str, tuple[float, Callable]] = {
    "int4 g128": (0.5 + 2 / 128, lambda w, copy: quantize_pack.quantize_int4(w, 128, copy)),
    "int4 g32": (0.5 + 2 / 32, lambda w, copy: quantize_pack.quantize_int4(w, 32, copy)),
    "w4a8": (0.5 + 2 / 128, lambda w, copy: quantize_pack.quantize_w4a8(w, copy)),
    "int8": (1.0, lambda w, copy: quantize_pack.quantize_row8(w, False, copy)),
    "fp8": (1.0, lambda w, copy: quantize_pack.quantize_row8(w, True, copy)),
}


def run(models: list[str]) -> Iterator[dict]:
    """One row a (shape, format, with or without copy), then all linears of the 8B in one go."""
    copy_rate = copy_gb_s()
    yield {"what": "copy bandwidth", "gb_s": copy_rate}
    for model in models:
        for linear in MODELS[model]:
            w = torch.randn(linear.n, linear.k, device="cuda", dtype=torch.bfloat16) * 0.02
            jobs, moved = {}, {}
            for name, (out, quantize) in _FORMATS.items():
                for copy in (False, True):
                    key = f"{name}{' + copy' if copy else ''}"
                    jobs[key] = lambda quantize=quantize, copy=copy: quantize(w, copy)
                    moved[key] = w.numel() * (2 + out + 2 * copy)
            packed, scales, _ = quantize_pack.quantize_int4(w, 128, False)
            jobs["dequantize int4"] = lambda: dequantize.dequantize_int4(packed, scales)
            moved["dequantize int4"] = w.numel() * (2.5 + 2 / 128)
            fp8, fp8_scales, _ = quantize_pack.quantize_row8(w, True, False)
            jobs["dequantize fp8"] = lambda: dequantize.dequantize_row8(fp8, fp8_scales)
            moved["dequantize fp8"] = w.numel() * 3.0
            jobs["operand w4a8"] = lambda: dequantize.w4a8_operand(packed, scales)
            moved["operand w4a8"] = w.numel() * (1.5 + 2 / 128)
            copies = {size: copy_job(size) for size in set(moved.values())}
            measured = times_us({**jobs, **copies})
            for key in jobs:
                rate = moved[key] / measured[key] / 1e3
                yield {
                    "what": key, "model": model, "layer": linear.layer, "n": linear.n, "k": linear.k,
                    "us": measured[key], "gb_s": rate, "of_peak_copy": rate / copy_rate,
                    "of_copy_of_same_size": measured[moved[key]] / measured[key],
                }  # fmt: skip
    yield from _whole_model("Qwen3-8B")


def _whole_model(model: str) -> Iterator[dict]:
    """Every linear of a model once, launched as a training step does (no CUDA graph), outputs kept."""
    weights = [
        torch.randn(linear.n, linear.k, device="cuda", dtype=torch.bfloat16)
        for linear in MODELS[model]
        for _ in range(linear.count)
    ]
    for name in ("int4 g128", "fp8", "int8", "w4a8"):
        quantize = _FORMATS[name][1]
        for copy in (False, True):
            us = times_us({"all": lambda: [quantize(w, copy) for w in weights]}, repeats=5, graph=False)["all"]
            yield {"what": f"all linears, {name}{' + copy' if copy else ''}", "model": model, "ms": us / 1e3}
    yield from _through_the_cache(model)


def _through_the_cache(model: str) -> Iterator[dict]:
    """The same weights as Hugging Face names them (q, k, v, gate and up apart), through QuantCache, as the learner does."""
    qkv, o, gate_up, down = MODELS[model]
    kv = (qkv.n - o.k) // 2
    shapes = [(o.k, qkv.k), (kv, qkv.k), (kv, qkv.k), (o.n, o.k), *[(gate_up.n // 2, gate_up.k)] * 2, (down.n, down.k)]
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(qkv.count) for shape in shapes]
    for name in ("w4a16", "fp8"):
        for mode in ("packed", "dequant"):
            cache, scheme = QuantCache(mode), QuantScheme.parse(name)

            def job(cache=cache, scheme=scheme):
                cache.invalidate()
                for i, w in enumerate(weights):
                    cache.step_weight(str(i), w, scheme)

            us = times_us({"all": job}, repeats=5, graph=False)["all"]
            yield {"what": f"all linears unmerged, QuantCache {mode}, {name}", "model": model, "ms": us / 1e3}
