"""vLLM's quantization method "qarl" for CPU engines: the learner's tensors, layout and arithmetic inside vLLM.

vLLM's own CPU layers repack their weights (and free the originals) after loading, so that weights cannot be replaced in
place; its unquantized lm_head even keeps computing with the packed copy of the *old* weight. These methods keep every
parameter under its checkpoint name and in its checkpoint layout. What a product reads, the operand, is derived once per
finished update, and products go through :mod:`qarl_openrlhf.kernels.dispatch`, the functions the learner calls.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
)

from qarl_openrlhf.engine.layout import ShardShapeParameter
from qarl_openrlhf.engine.moe_method import CpuMoEMethod
from qarl_openrlhf.kernels import dispatch, product
from qarl_openrlhf.patches.vllm_names import RoutedExperts
from qarl_openrlhf.quant import PackedWeight, QuantError, QuantScheme
from qarl_openrlhf.quant.names import DECODER_LAYER, ROUTER_GATES

METHOD = "qarl"


class QarlConfig(QuantizationConfig):
    """Quantization config ``{"quant_method": "qarl", "scheme": "w4a16:g64"}``, injected through ``hf_overrides``.

    Decoder linear layers and experts get the scheme; router gates, lm_head and embeddings stay unquantized. With scheme bf16
    nothing is quantized, but every weight can be replaced in place.
    """

    def __init__(self, scheme: QuantScheme):
        super().__init__()
        self.scheme = scheme

    @classmethod
    def from_config(cls, config: dict) -> "QarlConfig":
        return cls(QuantScheme.parse(config["scheme"]))

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str):
        if isinstance(layer, RoutedExperts):
            return CpuMoEMethod(self.scheme, layer, prefix)
        if isinstance(layer, LinearBase):
            # The learner's rule (quant.convert): decoder layers, without router gates.
            last = prefix.rsplit(".", 1)[-1]
            quantized = self.scheme.quantized and DECODER_LAYER.search(prefix) and last not in ROUTER_GATES
            return QarlLinearMethod(self.scheme, prefix) if quantized else PlainLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return PlainEmbeddingMethod()
        return None


class InPlaceLinearMethod(LinearMethodBase):
    """What vLLM asks of a linear layer's method, for parameters that keep their checkpoint layout."""

    in_place = True

    @abstractmethod
    def parameters(self, rows: list[int], k: int, dtype: torch.dtype, loader) -> dict[str, nn.Parameter]:
        """Name -> parameter of this rank, for a layer with ``rows`` of each projection fused into it and ``k`` columns."""

    def check(self, n: int, k: int, tp: int) -> None:
        """QuantError if a layer [n, k], whole, cannot run like this on ``tp`` ranks."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes,
    ) -> None:
        self.check(output_size, input_size, layer.tp_size)
        made = self.parameters(output_partition_sizes, input_size_per_partition, params_dtype, attributes["weight_loader"])
        for name, parameter in made.items():
            layer.register_parameter(name, parameter)


@register_weight_loader_v2_supported_method
class PlainLinearMethod(InPlaceLinearMethod):
    """Unquantized ``weight`` [N, K], replaceable in place."""

    def parameters(self, rows: list[int], k: int, dtype: torch.dtype, loader) -> dict[str, nn.Parameter]:
        weight = torch.zeros(sum(rows), k, dtype=dtype)
        return {"weight": ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)}

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.qarl_operand = product.operand(layer.weight.data, layer.weight.dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return dispatch.linear(x, layer.qarl_operand, bias)


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding and lm_head (possibly one shared weight) without vLLM's packed copy, which an update would leave stale."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.qarl_operand = None  # made at the first product: most embeddings never see one

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.qarl_operand is None:
            layer.qarl_operand = product.operand(layer.weight.data, layer.weight.dtype)
        return dispatch.linear(x, layer.qarl_operand, bias)

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        return F.embedding(input_, layer.weight)


@register_weight_loader_v2_supported_method
class QarlLinearMethod(InPlaceLinearMethod):
    """w4a16 and w8a8: parameters as :class:`PackedWeight` names them, forward as the learner's."""

    def __init__(self, scheme: QuantScheme, prefix: str):
        self.scheme = scheme
        self.prefix = prefix

    def check(self, n: int, k: int, tp: int) -> None:
        self.scheme.check_layer(self.prefix, n, k, tp=tp, device="cpu")

    def parameters(self, rows: list[int], k: int, dtype: torch.dtype, loader) -> dict[str, nn.Parameter]:
        n, both = sum(rows), {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        if self.scheme.weight_format == "int4":
            packed = torch.zeros(n, k // 8, dtype=torch.int32)
            scale = torch.zeros(n, k // self.scheme.group_size, dtype=dtype)
            shape = ShardShapeParameter(len(rows))
            shape.weight_loader = ShardShapeParameter.load
            return {
                "weight_packed": PackedvLLMParameter(data=packed, packed_dim=1, packed_factor=8, **both),
                "weight_scale": GroupQuantScaleParameter(data=scale, **both),
                "weight_shape": shape,
            }
        scale = torch.zeros(n, 1, dtype=dtype)
        both["weight_loader"] = _loader_of_codes(loader, self.prefix)
        return {
            "weight": ModelWeightParameter(data=torch.zeros(n, k, dtype=torch.int8), **both),
            "weight_scale": ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=loader),
        }

    def packed(self, layer: nn.Module) -> PackedWeight:
        """This rank's (fused) weight [N, K], sharing the engine's memory."""
        codes = layer.weight_packed if self.scheme.weight_format == "int4" else layer.weight
        factor = 8 if self.scheme.weight_format == "int4" else 1
        field = "weight_packed" if self.scheme.weight_format == "int4" else "weight"
        shape = (codes.shape[0], codes.shape[1] * factor)
        return PackedWeight(self.scheme, shape, layer.weight_scale.data, **{field: codes.data})

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.qarl_packed = self.packed(layer)
        layer.qarl_operand = dispatch.weight_operand(layer.qarl_packed, layer.weight_scale.dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return dispatch.quantized_linear(x, layer.qarl_packed, layer.qarl_operand, bias, self.scheme)

    def effective_weight(self, layer: nn.Module) -> Tensor:
        """[N, K] in the model's dtype: the weight that the operand, which the products read, stands for."""
        operand, dtype = layer.qarl_operand, layer.weight_scale.dtype
        if self.scheme.activation_format == "bf16":
            return operand.to(dtype)
        return (operand.float() * layer.weight_scale.float()).to(dtype)


def _loader_of_codes(loader, prefix: str):
    """vLLM's loader, which would round the BF16 ``weight`` of a layer that a checkpoint leaves unquantized to integers."""

    def load(parameter: nn.Parameter, loaded: Tensor, *shard) -> None:
        if loaded.dtype != parameter.dtype:
            raise QuantError(
                f"{prefix}: the checkpoint has a weight of {loaded.dtype}, and this engine quantizes every decoder layer: leave "
                "--engine out, vLLM's own kernels leave single layers as they are"
            )
        loader(parameter, loaded, *shard)

    return load


def refresh(model: nn.Module) -> None:
    """Derive every layer's operand from its parameters: once, after an update is complete."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, (PlainLinearMethod, PlainEmbeddingMethod, QarlLinearMethod, CpuMoEMethod)):
            method.process_weights_after_loading(module)


def is_in_place(model: nn.Module) -> bool:
    """Whether all of the model's weights can be replaced where they lie (it runs the method "qarl")."""
    methods = [m.quant_method for m in model.modules() if isinstance(m, (LinearBase, RoutedExperts))]
    return all(getattr(method, "in_place", False) for method in methods)
