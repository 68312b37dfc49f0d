"""vLLM's mixture-of-experts layers on a CPU: the learner's stacked weights and arithmetic, replaceable in place.

vLLM 0.29 has no W4A16 or INT8 experts for CPUs, and its BF16 ones repack their weights after loading and are not packed anew
when they are reloaded. Here each stacked expert tensor is one parameter in the layout in which the learner pushes it, e.g.
``gate_up_proj_weight_packed`` int32 [E, 2 I, H/8], and the block is computed by :mod:`qarl_openrlhf.kernels.moe`, the function
the learner calls. Under tensor parallelism a rank holds its share of the intermediate features, of gate and of up alike.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from qarl_openrlhf.engine.layout import Part
from qarl_openrlhf.engine.moe_layout import checkpoint_name, expert_slot, share
from qarl_openrlhf.kernels import dispatch, grouped, moe, product
from qarl_openrlhf.patches.vllm_names import RoutedExperts
from qarl_openrlhf.quant import PackedWeight, QuantError, QuantScheme
from qarl_openrlhf.quant.names import PROJECTIONS

_CODES = {"int4": "weight_packed", "int8": "weight"}


class CpuMoEMethod(FusedMoEMethodBase):
    """Experts in a scheme (bf16: unquantized). The router is vLLM's; its weights come in float32."""

    in_place = True  # parameters keep the layout in which they are pushed

    def __init__(self, scheme: QuantScheme, layer: RoutedExperts, prefix: str):
        super().__init__(layer.moe_config)
        self.scheme = scheme
        self.prefix = prefix
        _refuse_others(layer, prefix)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes,
    ) -> None:
        tp = self.moe.tp_size
        intermediate = intermediate_size_per_partition
        shapes = {"gate_up_proj": (num_experts, 2 * intermediate, hidden_size), "down_proj": (num_experts, hidden_size, intermediate)}
        whole = {"gate_up_proj": (2 * intermediate * tp, hidden_size), "down_proj": (hidden_size, intermediate * tp)}
        for projection in PROJECTIONS:
            self.scheme.check_layer(f"{self.prefix}.{projection}", *whole[projection], tp=tp, device="cpu")
            for suffix, tensor in self._zeros(shapes[projection], params_dtype).items():
                name = f"{projection}_{suffix}" if suffix else projection
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        # Read by engine.layout and by vLLM's AutoWeightsLoader; vLLM's own loader knows only its own names of stacked weights.
        layer.qarl_slot = partial(expert_slot, layer)
        layer.load_weights = partial(_load, layer)

    def _zeros(self, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        e, n, k = shape
        if not self.scheme.quantized:
            return {"": torch.zeros(shape, dtype=dtype)}
        if self.scheme.weight_format == "int8":
            return {"weight": torch.zeros(shape, dtype=torch.int8), "weight_scale": torch.zeros(e, n, 1, dtype=dtype)}
        return {
            "weight_packed": torch.zeros(e, n, k // 8, dtype=torch.int32),
            "weight_scale": torch.zeros(e, n, k // self.scheme.group_size, dtype=dtype),
            "weight_shape": torch.zeros(2, dtype=torch.int64),
        }

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None  # vLLM's own kernels would want one

    def packed(self, layer: RoutedExperts, projection: str) -> PackedWeight:
        """This rank's stacked weight [E, N, K], sharing the engine's memory."""
        field = _CODES[self.scheme.weight_format]
        codes = getattr(layer, f"{projection}_{field}").data
        shape = (*codes.shape[:2], codes.shape[2] * (8 if field == "weight_packed" else 1))
        return PackedWeight(self.scheme, shape, getattr(layer, f"{projection}_weight_scale").data, **{field: codes})

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Derive what the products read from the parameters: at start and after every complete update."""
        layer.qarl_operands, layer.qarl_products = {}, {}
        for projection in PROJECTIONS:
            if self.scheme.quantized:
                packed = self.packed(layer, projection)
                operand = dispatch.weight_operand(packed, packed.weight_scale.dtype)
                multiply = partial(_quantized, packed, operand)
            else:
                weight = getattr(layer, projection).data
                operand = product.operand(weight, weight.dtype)
                multiply = partial(_plain, operand)
            layer.qarl_operands[projection], layer.qarl_products[projection] = operand, multiply

    def apply(
        self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts=None, shared_experts_input=None
    ) -> Tensor:
        products = layer.qarl_products
        return moe.experts_mlp(
            x, topk_ids.long(), topk_weights, products["gate_up_proj"], products["down_proj"], layer.local_num_experts
        )

    def effective_weights(self, layer: RoutedExperts, path: str) -> dict[str, tuple[tuple[int, ...], Part, Tensor]]:
        """Layer name -> (full shape [E, N, K], part, this rank's part of it in the model's dtype), of quantized experts.

        The weights that the operands stand for, which the products read.
        """
        if not self.scheme.quantized:
            return {}
        found = {}
        for projection in PROJECTIONS:
            operand, scale = layer.qarl_operands[projection], getattr(layer, f"{projection}_weight_scale").data
            if self.scheme.activation_format == "bf16":
                weight = operand.to(scale.dtype)
            else:
                weight = (operand.float() * scale.float()).to(scale.dtype)
            experts, *shape = weight.shape
            part, whole = share(projection, shape, self.moe, (0, experts))
            found[checkpoint_name(path, projection)] = ((experts, *whole), part, part.seen(weight).clone())
        return found


def _load(layer: RoutedExperts, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Pushed tensors of this block, named from it on ("down_proj.weight_scale"), into this rank's parameters."""
    for name, tensor in weights:
        attribute = name.replace(".", "_")
        if attribute not in layer._parameters:
            raise QuantError(f"{layer.layer_name}.{name} is no tensor of these experts; they have {', '.join(layer._parameters)}")
        slot = expert_slot(layer, "", attribute)
        slot.read().copy_(slot.part.of(tensor))
        yield attribute


def _quantized(packed: PackedWeight, operand: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return grouped.forward(x, packed, operand, ends)


def _plain(operand: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return grouped.plain_forward(x, operand, ends)


def _refuse_others(layer: RoutedExperts, prefix: str) -> None:
    """QuantError for routing or parallelism that the learner's block does not compute."""
    odd = {
        f"scoring function {layer.scoring_func}": layer.scoring_func != "softmax",
        "grouped top-k routing": layer.use_grouped_topk,
        "a routing function of its own": layer.custom_routing_function is not None,
        "a score correction bias": layer.e_score_correction_bias is not None,
        f"routed scaling factor {layer.routed_scaling_factor}": layer.routed_scaling_factor != 1.0,
        "router weights applied to the input": layer.apply_router_weight_on_input,
        "biases": layer.moe_config.has_bias,
        f"activation {layer.activation.value}": layer.activation.value != "silu",
        "expert parallelism": layer.use_ep,
    }
    found = [what for what, is_so in odd.items() if is_so]
    if found:
        raise QuantError(
            f"{prefix}: mixture-of-experts layers with {', '.join(found)} have no CPU engine method; Qwen3-MoE's form has "
            "(softmax, top-k, SiLU; tensor parallel, not expert parallel)"
        )
