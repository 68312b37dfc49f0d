"""Dtypes of a layer's input: what nn.Linear multiplies gives the same bits in every cache mode, with autocast or without; the
rest is one error."""

from contextlib import nullcontext
from types import SimpleNamespace as N

import pytest
import torch
from torch import nn

from qarl_openrlhf.kernels import product
from qarl_openrlhf.quant import QuantError, QuantScheme
from qarl_openrlhf.quant.cache import QuantCache
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.experts import QuantExperts
from qarl_openrlhf.quant.names import PROJECTIONS
from qarl_openrlhf.quant.linear import QuantLinear, quantized_forward
from tests.tiny_models import loss_of, tiny, tiny_moe

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SCHEMES = ("bf16", "w4a16:g32", "w4a16:g32:rollout", "w8a8", "fp8", "w4a8")
MODES = ("packed", "dequant", "none")


def linear(scheme: QuantScheme, cache: QuantCache, dtype: torch.dtype):
    torch.manual_seed(0)
    layer = nn.Linear(256, 32)
    layer.to(BF16).to(dtype)  # the same values in every dtype
    return QuantLinear.convert(layer, scheme, name="a.layer", cache=cache), [layer.weight, layer.bias]


def experts(scheme: QuantScheme, cache: QuantCache, dtype: torch.dtype):
    made = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (3, 256, 128), "down_proj": (3, 128, 128)}
    weights = {name: nn.Parameter((torch.randn(shape, generator=made) / 16).to(BF16).to(dtype)) for name, shape in shapes.items()}
    block = QuantExperts(N(**weights, num_experts=3), dict.fromkeys(PROJECTIONS, scheme), name="a.layer", cache=cache)
    ids = torch.randn(6, 3, generator=made).topk(2, -1).indices
    return lambda x: block(x, ids, torch.full((6, 2), 0.5)), list(weights.values())


KINDS = {linear: 256, experts: 128}
# Not nn.Linear's own products, whose gradients autocast rounds.
OURS = [(linear, scheme) for scheme in SCHEMES if QuantScheme.parse(scheme).aligned] + [(experts, scheme) for scheme in SCHEMES]


def outcome(kind, scheme: str, mode: str, x: torch.Tensor, weight: torch.dtype, cast: torch.dtype | None, backward_cast=None):
    """Output and gradients, or the error."""
    cache = QuantCache(mode)
    call, parameters = kind(QuantScheme.parse(scheme), cache, weight)
    x = x.clone().requires_grad_()
    try:
        with torch.autocast("cpu", cast or BF16, enabled=cast is not None):
            y = call(x)
    except QuantError as error:
        return str(error)
    with torch.autocast("cpu", backward_cast or BF16, enabled=backward_cast is not None):
        return [y.detach(), *torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))]


def same(one, other) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("cast", [None, BF16, FP16], ids=str)
@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", list(KINDS), ids=lambda kind: kind.__name__)
def test_all_cache_modes_give_the_same_bits_or_the_one_error(kind, scheme, weight, cast):
    rows = torch.randn(6, KINDS[kind])
    for dtype in (BF16, FP16, FP32, FP64):
        x = rows.to(BF16).to(dtype)
        first, *others = (outcome(kind, scheme, mode, x, weight, cast) for mode in MODES)
        assert all(same(first, other) for other in others), dtype
        if cast is None or dtype == FP64:
            takes, gives = dtype == weight, dtype
        else:
            takes, gives = weight in (cast, FP32), cast
        if takes:
            assert not isinstance(first, str) and first[0].dtype == gives and first[1].dtype == dtype
            assert all(g.dtype == weight for g in first[2:])
        else:
            assert str(weight) in first and str(dtype if cast is None or dtype == FP64 else cast) in first
            assert first.startswith("a.layer")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", list(KINDS), ids=lambda kind: kind.__name__)
def test_autocast_gives_what_a_bf16_layer_gives(kind, scheme):
    """Output and gradients, wherever the backward runs; float32 parameters are rounded for the products."""
    x = torch.randn(6, KINDS[kind])
    for given in (x, x.to(BF16)):
        plain = outcome(kind, scheme, "packed", x.to(BF16), BF16, None)
        # FP16: some CPUs have it, and PyTorch's own backward of a product takes it then; that of the experts' chunk refuses it.
        for backward_cast in (None, BF16, FP16)[: 2 + (kind is linear and (kind, scheme) in OURS)]:
            found = outcome(kind, scheme, "packed", given, BF16, BF16, backward_cast)
            assert same([found[0], *(g.to(BF16) for g in found[1:])], plain), backward_cast
    assert torch.equal(outcome(kind, scheme, "dequant", x, FP32, BF16)[0], plain[0])


@pytest.mark.parametrize("cast", [BF16, FP16], ids=str)
@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
def test_a_plain_layer_gives_nn_linears_dtype_or_the_error_where_it_raises(weight, cast):
    for dtype in (BF16, FP16, FP32, FP64):
        theirs, x = nn.Linear(256, 32).to(weight), torch.randn(6, 256).to(dtype)
        for on in (False, True):
            try:
                with torch.autocast("cpu", cast, enabled=on):
                    expected = theirs(x).dtype
            except RuntimeError:
                expected = None
            found = outcome(linear, "bf16", "packed", x, weight, cast if on else None)
            refused = isinstance(found, str)
            # More is refused in one place: nn.Linear rounds a BF16 weight to FP16, see product_dtype.
            assert refused if expected is None or (on and weight == BF16 and cast == FP16) else found[0].dtype == expected


def test_autocast_does_not_round_an_integer_product():
    codes = torch.full((1, 128), 127, dtype=torch.int8)
    codes[0, 0] = 126
    for cast in (BF16, FP16):
        with torch.autocast("cpu", cast):
            assert product.integer_product(codes, codes).item() == 127 * 127**2 + 126**2  # no BF16 number


@pytest.mark.parametrize("kind, scheme", OURS, ids=lambda given: getattr(given, "__name__", given))
def test_autocast_does_not_round_the_gradients_of_float32_parameters(kind, scheme):
    x = torch.randn(6, KINDS[kind])
    for cast, given in ((None, x), (BF16, x)):
        outside, inside = (outcome(kind, scheme, "dequant", given, FP32, cast, backward) for backward in (None, BF16))
        assert same(outside, inside)


@pytest.mark.parametrize("make", [tiny, tiny_moe], ids=lambda make: make.__name__)
def test_a_model_of_float32_parameters_learns_through_low_bit_weights_under_autocast(make):
    """As data.pretrain teaches on a GPU, in both forms."""
    losses = {}
    for mode in MODES:
        convert_model(model := make(dtype=FP32), QuantScheme.parse("w4a16:g32:rollout"), cache=mode)
        for form in (nullcontext(), quantized_forward(model)):
            model.zero_grad()
            with form, torch.autocast("cpu", BF16):
                loss = loss_of(model)
            loss.backward()
            assert all(p.grad is not None and p.grad.dtype == FP32 and p.grad.isfinite().all() for p in model.parameters())
            losses.setdefault(mode, []).append(loss.detach())
    assert losses["packed"] == losses["dequant"] == losses["none"] and losses["none"][0] != losses["none"][1]


def test_a_rollout_layer_that_computes_as_the_engine_is_held_to_the_same():
    cache = QuantCache("dequant")
    layer, _ = linear(QuantScheme.parse("w4a16:g32:rollout"), cache, BF16)
    x = torch.randn(4, 256)
    with quantized_forward(N(quant_cache=cache)):
        with pytest.raises(QuantError, match=r"^a\.layer: the input is torch\.float32 and the weight torch\.bfloat16"):
            layer(x)
        expected = layer(x.to(BF16))
        with torch.autocast("cpu", BF16):
            assert torch.equal(layer(x), expected)
