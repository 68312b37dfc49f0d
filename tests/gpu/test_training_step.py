"""Whole training runs on one card, colocated, --quant.kernel triton: two steps of each scheme, dense, MoE and packed.

All runs of this file go side by side, each with a Ray head of its own.
"""

import time
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from qarl_openrlhf.actors import varlen_attention
from qarl_openrlhf.patches.flash_attn import pad_input, unpad_input
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.report import load_run
from tests.e2e.conftest import two_steps, write_prompts
from tests.e2e.test_faults import Run
from tests.tiny_models import VOCABULARY, make_tokenizer, random_model, save_tiny_model

RUNS = {
    "w4a16": {"quant.scheme": "w4a16"},
    "fp8": {"quant.scheme": "fp8"},
    "w8a8": {"quant.scheme": "w8a8"},
    "w4a8": {"quant.scheme": "w4a8"},
    "moe-w4a16": {"quant.scheme": "w4a16"},
    "moe-fp8": {"quant.scheme": "fp8"},
    "w4a16-packed": {"quant.scheme": "w4a16", "ds.packing_samples": True},
}
if find_spec("liger_kernel"):
    RUNS["fp8-liger"] = {"quant.scheme": "fp8", "ds.use_liger_kernel": True, "ds.packing_samples": True, "actor.logprob_chunk": 32}
# What multiplies the 14 linear layers, and the 2 stacked expert weights of each of 2 layers: counted once a layer and forward.
PRODUCTS = {
    "w4a16": {"library BF16": 14},
    "fp8": {"w8a8_gemm": 14},
    "w8a8": {"w8a8_gemm": 14},
    "w4a8": {"w8a8_gemm": 14},
    "moe-w4a16": {"library BF16": 8, "library BF16 grouped": 4},
    "moe-fp8": {"w8a8_gemm": 8, "_scaled_grouped_mm": 4},
    "w4a16-packed": {"library BF16": 14},
    "fp8-liger": {"w8a8_gemm": 14},
}
QUANTIZERS = {"w4a16": "quantize_int4", "fp8": "quantize_row8", "w8a8": "quantize_row8", "w4a8": "quantize_w4a8"}
FORWARDS = 8  # four micro-batches, once for the old log-probs and once in training; probes come on top
LIMIT_S = 280


def save_tiny_moe(directory) -> str:
    """Eight experts of a size that vLLM's kernels take in groups of 128."""

    def spread(name: str, parameter) -> None:
        if "norm" in name:
            parameter.uniform_(0.8, 1.2)

    shape = dict(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, max_position_embeddings=512)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    tokens = dict(bos_token_id=None, eos_token_id=2, pad_token_id=3)
    rest = dict(tie_word_embeddings=False, initializer_range=0.08)
    random_model("qwen3_moe", spread, **shape, **experts, **tokens, **rest).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    moe = save_tiny_moe(tmp_path_factory.mktemp("moe"))
    return {"dense": save_tiny_model(tmp_path_factory.mktemp("dense"), "qwen3", hidden=256), "moe": moe}


def wanted(name: str, models: dict, prompts: str, out: str) -> dict:
    return two_steps(models["moe" if name.startswith("moe") else "dense"], prompts, out) | {
        "device": "cuda",
        "train.colocate_all": True,
        "train.batch_size": 16,  # one update a rollout: all of its micro-batches come before any update
        "vllm.gpu_memory_utilization": 0.05,
        # fixed: the runs beside it grow and shrink while vLLM would measure what of the card is free
        "vllm.engine_args": '{"kv_cache_memory_bytes": 268435456}',
        "vllm.enforce_eager": True,  # graphs and torch.compile: test_parity, test_engine_modes
        "quant.kernel": "triton",
        "objective.name": "tbpo",
        "sync.probe_tol": 0.5,  # a random model's log-probs are far apart
        **RUNS[name],
    }


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    """{name: (exit status, end of its output, rows of its metrics)}."""
    prompts = write_prompts(tmp_path_factory.mktemp("data"))
    flags = {name: wanted(name, models, prompts, str(tmp_path_factory.mktemp(name))) for name in RUNS}
    logs = tmp_path_factory.mktemp("logs")
    started = {name: Run(flags[name], logs / f"{name}.txt") for name in RUNS}
    until = time.monotonic() + LIMIT_S
    finished = {}
    try:
        for name, run in started.items():
            try:
                status = run.process.wait(max(1.0, until - time.monotonic()))
            except Exception as error:
                status = repr(error)
            rows = load_run(flags[name]["ckpt.output_dir"]).rows if run.metrics.exists() else []
            finished[name] = status, run.text[-3000:], rows
        for run in started.values():
            if run.process.poll() is not None:
                run.assert_gone()
        yield finished
    finally:
        for run in started.values():
            run.end()


@pytest.fixture(params=list(RUNS))
def name(request):
    return request.param


def rows_of(runs, name: str) -> list[dict]:
    status, text, rows = runs[name]
    assert status == 0, f"{name} ended with {status}:\n{text}"
    assert [row["step"] for row in rows] == [1, 2]
    return rows


def test_two_steps(runs, name):
    for row in rows_of(runs, name):
        assert row["sync/checksum_ok"] == 1.0 and row["sync/probe_abs_logp"] < 0.5
        # log r is exactly 0 for every token before the first update: its mean is, and the mean of r is 1.
        assert row["objective/ppo_kl"] == 0.0 and row["objective/ratio_mean"] == 1.0
        assert row["objective/in_band_frac_by_update/0"] == 1.0
        print(f"{name}: mean |delta logp| to the engine {row['mismatch/abs_logp_mean']:.4f}")
        assert row["mismatch/abs_logp_mean"] < 0.25
    assert rows_of(runs, name)[-1]["sync/changed_code_frac"] > 0


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
