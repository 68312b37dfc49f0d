"""Weights of which no quantized ones can be made are counted, whatever made them so."""

import pytest
import torch

from qarl_openrlhf.quant import QuantError, QuantScheme
from qarl_openrlhf.quant.packing import quantize_weight

TOO_LARGE = 3.4e38  # finite in float32, infinite in BF16


@pytest.mark.parametrize("scheme", ["w4a16:g32", "w8a8", "fp8"])
@pytest.mark.parametrize(
    "dtype, values, said",
    [
        (torch.bfloat16, [float("nan"), float("inf")], "2 of 128 weights are NaN or infinite; the update"),
        (torch.float32, [float("nan"), float("-inf")], "2 of 128 weights are NaN or infinite; the update"),
        (torch.float32, [TOO_LARGE], "1 of 128 weights are NaN or infinite as BF16 (1 of them are too large for it); the update"),
        (torch.float32, [float("nan"), -TOO_LARGE], "2 of 128 weights are NaN or infinite as BF16 (1 of them are too large for it); the update"),
    ],
    ids=["bf16", "float32", "too large", "both"],
)
def test_all_that_a_scale_cannot_hold_are_counted(scheme, dtype, values, said):
    weight = torch.ones(2, 64, dtype=dtype)
    weight[1, : len(values)] = torch.tensor(values, dtype=dtype)
    with pytest.raises(QuantError) as raised:
        quantize_weight(weight, QuantScheme.parse(scheme), name="layer")
    assert str(raised.value).startswith(f"layer: {said}")
