"""What an estimate of memory needs of a model, and the bytes that follow from its shape and a scheme alone."""

import re
from collections import Counter
from dataclasses import dataclass

from qarl_openrlhf.optim.groups import matrix_shapes
from qarl_openrlhf.quant.convert import ConversionReport
from qarl_openrlhf.quant.scheme import QuantScheme

_DECODER_LAYER = re.compile(r".*?\blayers\.\d+\.")


@dataclass(frozen=True)
class ModelShape:
    """What the estimate needs of a model; counts of weights, not bytes.

    quantized: weights the scheme quantizes; matrices: weights Muon updates; largest: largest quantized layer (or stack of
    experts); largest_other: largest tensor that stays BF16. mlp: intermediate features a token passes through.
    """

    parameters: int
    quantized: int
    matrices: int
    largest: int
    largest_other: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    experts_hidden: int = 0  # hidden features of the sorted copies a mixture of experts makes, a token
    tensors: tuple[tuple[int, bool], ...] = ()  # (weights, whether Muon updates it) of each parameter, in order
    layer: int = 0  # weights of the largest decoder layer
    stacks: tuple[tuple[int, int, int], ...] = ()  # (count, rows, columns) of the parameters that Muon updates, each shape once

    @classmethod
    def of(cls, model, report: ConversionReport, config) -> "ModelShape":
        """Read off a model on the meta device and the plan of its conversion."""
        text = config.get_text_config()
        quantized = {layer.name for layer in report.quantized}
        plain = [p.numel() for name, p in model.named_parameters() if name.removesuffix(".weight") not in quantized]
        active = getattr(text, "num_experts_per_tok", 0) if getattr(text, "num_experts", 0) else 0
        matrices = matrix_shapes(model)
        in_layer = Counter()
        for name, p in model.named_parameters():
            if found := _DECODER_LAYER.match(name):
                in_layer[found[0]] += p.numel()
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            quantized=sum(p.experts * p.out_features * p.in_features for p in report.quantized),
            matrices=sum(count * rows * columns for count, rows, columns in matrices.values()),
            largest=max([p.experts * p.out_features * p.in_features for p in report.quantized], default=0),
            largest_other=max(plain, default=0),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            mlp=active * text.moe_intermediate_size if active else text.intermediate_size,
            vocabulary=text.vocab_size,
            experts_hidden=active * text.hidden_size,
            tensors=tuple((p.numel(), name in matrices) for name, p in model.named_parameters()),
            layer=max(in_layer.values(), default=0),
            stacks=tuple(sorted(set(matrices.values()))),
        )


def packed_bytes(scheme: QuantScheme) -> float:
    """Bytes a quantized weight has in the published format, scales included (row scales of 8-bit formats are negligible)."""
    if not scheme.quantized:
        return 2.0
    return 0.5 + 2 / scheme.group_size if scheme.weight_format == "int4" else 1.0


def cache_bytes(scheme: QuantScheme, mode: str, shape: ModelShape) -> int:
    """The learner's quantization cache on every rank, at every ZeRO stage: the whole model's packed weights are on each."""
    if not scheme.quantized or mode == "none":
        return 0
    codes = 1 if scheme.name == "w4a8" else 0  # the e4m3 matrix its product reads, beside the copy for the backward
    return int(shape.quantized * (packed_bytes(scheme) + (2 + codes if mode == "dequant" else 0)))


def staging_bytes(bucket_mb: float, shape: ModelShape, scheme: QuantScheme) -> int:
    """The two buffers of an end of a push: each holds a bucket, or the largest tensor, which travels whole whatever the TP."""
    return 2 * max(int(bucket_mb * 2**20), int(shape.largest * packed_bytes(scheme)), 2 * shape.largest_other)


def rebuilt_bytes(shape: ModelShape, tp: int) -> int:
    """The layer that an engine's rank brings into its kernels' layout on the side: at most its BF16 weights, before and after."""
    return int(2 * shape.layer / tp)


def layer_activations(shape: ModelShape, tokens: int) -> int:
    """Bytes that a layer's forward keeps of so many tokens, in BF16, on a GPU and on a CPU."""
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # residuals, norms (in float32, too), rotated q and k, attention output, gate, up, their product, the rows sorted by expert
    return 2 * tokens * (10 * shape.hidden + 3 * attention + 4 * shape.mlp + 3 * shape.experts_hidden)


def kv_bytes_per_token(shape: ModelShape, tp: int) -> int:
    """BF16 keys and values of one token on one engine rank (vLLM gives each rank at least one head)."""
    return 2 * 2 * shape.layers * max(1, shape.kv_heads // tp) * shape.head_dim
