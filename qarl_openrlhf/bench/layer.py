"""Forward and backward of one decoder layer of Qwen3-8B's shape, 16,384 tokens, each scheme beside BF16."""

from collections.abc import Iterator

import torch
from torch import nn

from qarl_openrlhf.bench.forward import MICRO_BATCHES
from qarl_openrlhf.bench.timing import times_us
from qarl_openrlhf.kernels import dispatch
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model

SEQUENCES, LENGTH = 8, 2048


class OneLayer(nn.Module):
    """A Hugging Face decoder layer under the name that convert_model looks for."""

    def __init__(self):
        super().__init__()
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

        config = Qwen3Config(
            hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            num_hidden_layers=1,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        with torch.device("cuda"):
            self.layers = nn.ModuleList([Qwen3DecoderLayer(config, 0)]).bfloat16()
            self.rotary = Qwen3RotaryEmbedding(config)

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)[None]
        out = self.layers[0](x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return out[0] if isinstance(out, tuple) else out


def run(models: list[str]) -> Iterator[dict]:
    """One row a (scheme, cache): milliseconds of forward + backward, its ratio to BF16 with and without quantization."""
    x = torch.randn(SEQUENCES, LENGTH, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    models_, jobs = {}, {}
    for name, cache in (
        ("bf16", "none"), ("w4a16", "dequant"), ("w4a16", "packed"), ("fp8", "packed"), ("fp8", "dequant"),
        ("w8a8", "packed"), ("w8a8", "dequant"), ("w4a8", "dequant"),
    ):  # fmt: skip
        key = f"{name} {cache}" if name != "bf16" else name
        torch.manual_seed(0)
        models_[key] = OneLayer()
        if name != "bf16":
            convert_model(models_[key], QuantScheme.parse(name), cache=cache)
        jobs[key] = lambda model=models_[key]: _step(model, x)
    us = times_us(jobs, repeats=9, graph=False)
    forward_us = times_us({key: lambda model=m: _forward(model, x) for key, m in models_.items()}, repeats=7, graph=False)
    for key, model in models_.items():
        quantize = 0.0
        if key != "bf16":
            quantize = times_us({"q": lambda model=model: _quantize(model, x)}, repeats=5, graph=False)["q"]
        before = dict(dispatch.kernel_calls())
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        _step(model, x)
        torch.cuda.synchronize()
        counted = {k: v - before.get(k, 0) for k, v in dispatch.kernel_calls().items() if v > before.get(k, 0)}
        yield {
            "scheme": key, "tokens": SEQUENCES * LENGTH, "forward + backward ms": us[key] / 1e3,
            "forward ms": forward_us[key] / 1e3, "quantize ms": quantize / 1e3, "/ bf16": us[key] / us["bf16"],
            f"/ bf16 with quantization over {MICRO_BATCHES}": (us[key] + quantize / MICRO_BATCHES) / us["bf16"],
            "peak MiB": (torch.cuda.max_memory_allocated() - held) / 2**20, "kernel calls": counted,
        }  # fmt: skip


def _step(model, x):
    model.zero_grad(set_to_none=True)
    x.grad = None
    y = model(x)
    y.backward(y.detach())


def _forward(model, x):
    with torch.no_grad():
        model(x)


def _quantize(model, x):
    """What the first forward of an optimizer step pays: quantizing, and the copies of mode dequant."""
    model.quant_cache.invalidate()
    for module in model.modules():
        if hasattr(module, "quant_cache") and getattr(module, "scheme", None):
            module.packed()
