"""Whole training runs on one card, colocated, --quant.kernel triton: two steps of each scheme, dense, MoE and packed.

All runs of this file go side by side, each with a Ray head of its own.
"""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from qarl_openrlhf.actors import varlen_attention
from qarl_openrlhf.patches.flash_attn import pad_input, unpad_input
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model
from tests.tiny_models import VOCABULARY

from .runs import assert_aligned, rows_of, save_models, selected, side_by_side

RUNS = {
    "w4a16": {"quant.scheme": "w4a16"},
    "fp8": {"quant.scheme": "fp8"},
    "w8a8": {"quant.scheme": "w8a8"},
    "w4a8": {"quant.scheme": "w4a8"},
    "bf16": {"quant.scheme": "bf16"},
    "moe-bf16": {"quant.scheme": "bf16"},
    "moe-w4a16": {"quant.scheme": "w4a16"},
    "moe-fp8": {"quant.scheme": "fp8"},
    "moe-w8a8": {"quant.scheme": "w8a8"},
    "moe-w4a8": {"quant.scheme": "w4a8"},
    "w4a16-packed": {"quant.scheme": "w4a16", "ds.packing_samples": True},
}
if find_spec("liger_kernel"):
    RUNS["fp8-liger"] = {"quant.scheme": "fp8", "ds.use_liger_kernel": True, "ds.packing_samples": True, "actor.logprob_chunk": 32}
    RUNS["moe-w4a16-liger"] = RUNS["fp8-liger"] | {"quant.scheme": "w4a16"}
if find_spec("bitsandbytes"):
    RUNS["w4a16-bitsandbytes"] = {
        "quant.scheme": "w4a16", "algo.kl.init_coef": 0.01, "algo.kl.estimator": "k3", "ref.load_in_4bit": True, "actor.adam.state_bits": 8,
    }  # fmt: skip
QUANTIZED = [name for name, changes in RUNS.items() if changes["quant.scheme"] != "bf16"]
# What multiplies the 14 linear layers, and the 2 stacked expert weights of each of 2 layers: counted once a layer and forward.
PRODUCTS = {
    "w4a16": {"library BF16": 14},
    "fp8": {"w8a8_gemm": 14},
    "w8a8": {"w8a8_gemm": 14},
    "w4a8": {"w8a8_gemm": 14},
    "moe-w4a16": {"library BF16": 8, "library BF16 grouped": 4},
    "moe-fp8": {"w8a8_gemm": 8, "_scaled_grouped_mm": 4},
    "moe-w8a8": {"w8a8_gemm": 8, "grouped_w8a8": 4},
    "moe-w4a8": {"w8a8_gemm": 8, "_scaled_grouped_mm": 4},
    "w4a16-packed": {"library BF16": 14},
    "w4a16-bitsandbytes": {"library BF16": 14},
    "fp8-liger": {"w8a8_gemm": 14},
    "moe-w4a16-liger": {"library BF16": 8, "library BF16 grouped": 4},
}
QUANTIZERS = {"w4a16": "quantize_int4", "fp8": "quantize_row8", "w8a8": "quantize_row8", "w4a8": "quantize_w4a8"}
FORWARDS = 8  # four micro-batches, once for the old log-probs and once in training; probes come on top


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return save_models(tmp_path_factory)


@pytest.fixture(scope="module")
def runs(request, models, tmp_path_factory):
    with side_by_side(selected(request, RUNS), models, tmp_path_factory) as finished:
        yield finished


@pytest.mark.parametrize("name", RUNS)
def test_two_steps(runs, name):
    assert_aligned(rows_of(runs, name), name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_kernels_ran_for_every_quantized_layer(runs, name):
    for row in rows_of(runs, name):
        calls = {key[len("kernels/") : -len("_calls")]: n for key, n in row.items() if key.startswith("kernels/")}
        print(f"{name}: {calls}")
        for kernel, layers in PRODUCTS[name].items():
            count = calls[kernel]
            assert count >= FORWARDS * layers and count % layers == 0, (kernel, calls)
        layers = sum(PRODUCTS[name].values())
        assert calls[QUANTIZERS[RUNS[name]["quant.scheme"]]] >= layers, calls
        if "w8a8_gemm" in PRODUCTS[name]:  # q, k, v share one quantization of their input, and so do gate and up
            assert calls["act_quant"] >= FORWARDS * 8 and calls["act_quant_shared"] > 0


@pytest.mark.parametrize("name", [name for name in RUNS if "bitsandbytes" in name])
def test_an_nf4_reference_is_not_the_policy(runs, name):
    for row in rows_of(runs, name):
        assert 5e-4 < row["kl"] < 1.0


def test_a_packed_run_is_the_padded_one(runs):
    """The same rollout, whose log-probs the learner computes in the other layout."""
    packed, padded = rows_of(runs, "w4a16-packed")[0], rows_of(runs, "w4a16")[0]
    for metric in ("reward", "rollout/tokens"):
        assert packed[metric] == padded[metric]
    for metric, tolerance in (("mismatch/abs_logp_mean", 0.02), ("mismatch/kl", 0.02), ("policy/entropy_sampled", 1e-5)):
        assert abs(packed[metric] - padded[metric]) < tolerance, metric


# ---- packing, token by token ---------------------------------------------------------------------------------------------


def log_probs(logits, tokens):
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize(("scheme", "gap", "angle"), [("bf16", 0.02, 0.999), ("w4a16", 0.02, 0.999), ("fp8", 0.1, 0.97)])
def test_packed_log_probs_and_gradients(models, scheme, gap, angle):
    """PyTorch's varlen attention beside padded batches, with the scheme's kernels. 8-bit codes amplify the difference."""
    varlen_attention.register()
    torch.manual_seed(0)
    lengths = (60, 3, 47, 128, 1, 90)
    tokens = torch.randint(4, VOCABULARY, (len(lengths), max(lengths) + 2), device="cuda")
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        mask[row, 1 : 1 + length] = 1
    positions, following = (mask.cumsum(-1) - 1).clamp(min=0), torch.roll(tokens, -1, 1)
    results = []
    for implementation in ("sdpa", varlen_attention.NAME):
        options = {"dtype": torch.bfloat16, "attn_implementation": implementation}
        model = AutoModelForCausalLM.from_pretrained(models["dense"], **options).cuda()
        convert_model(model, QuantScheme.parse(scheme))
        if implementation == "sdpa":
            found = log_probs(model(tokens, attention_mask=mask, position_ids=positions).logits, following) * mask
        else:
            flat, indices, *_ = unpad_input(tokens[..., None], mask)
            at, targets = (x.flatten()[indices][None] for x in (positions, following))
            logits = model(flat.T, attention_mask=None, position_ids=at, use_cache=False).logits
            found = pad_input(log_probs(logits, targets)[0], indices, *tokens.shape)
        found.sum().backward()
        results.append((found.detach(), {n: p.grad.float() for n, p in model.named_parameters()}))
    (padded, gradients), (packed, theirs) = results
    difference = (padded - packed).abs().sum() / mask.sum()
    print(f"{scheme}: mean |delta logp| packed and padded {float(difference):.5f}")
    assert difference < gap
    for parameter, gradient in gradients.items():
        assert torch.cosine_similarity(gradient.flatten(), theirs[parameter].flatten(), 0) > angle, parameter
