"""One quantizer for the learner's forward, the push to the engines and the exported checkpoint."""

from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.packing import PackedWeight, count_changed_codes, dequantize_weight, quantize_weight
from qarl_openrlhf.quant.scheme import QuantScheme

__all__ = ["PackedWeight", "QuantError", "QuantScheme", "count_changed_codes", "dequantize_weight", "quantize_weight"]
