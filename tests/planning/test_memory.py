"""The estimate against what is measured: the cache's own bytes, the published tensors, the optimizer of the recipe."""

import dataclasses
from types import SimpleNamespace as N

import pytest
import torch

from qarl_openrlhf.planning import memory, offload
from qarl_openrlhf.planning.memory import GIB, Estimate, ModelShape, Part, cache_bytes, packed_bytes
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from qarl_openrlhf.quant.scheme import QuantScheme
from tests.tiny_models import make_model


def converted(family: str, scheme: str, mode: str):
    model = make_model(family, hidden=256)
    report = convert_model(model, QuantScheme.parse(scheme), cache=mode)
    return model, ModelShape.of(model, report, model.config)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["w4a16:g64", "w4a16:g32", "w8a8"])
@pytest.mark.parametrize("mode", ["packed", "none"])
def test_cache_and_push_are_as_large_as_estimated(family, scheme, mode):
    model, shape = converted(family, scheme, mode)
    sent = dict(published_tensors(model, QuantScheme.parse(scheme)))
    expected = cache_bytes(QuantScheme.parse(scheme), mode, shape)
    # row scales of 8-bit weights are not counted: 2 of K bytes, and K is small here
    assert model.quant_cache.nbytes == pytest.approx(expected, rel=0.04 if scheme == "w8a8" else 0.005, abs=0 if expected else 1)
    estimate = shape.quantized * packed_bytes(QuantScheme.parse(scheme)) + 2 * (shape.parameters - shape.quantized)
    assert sum(tensor.nbytes for tensor in sent.values()) == pytest.approx(estimate, rel=0.04)


def test_dequant_adds_a_bf16_copy():
    _, shape = converted("qwen3", "w4a16:g64", "packed")
    scheme = QuantScheme.parse("w4a16:g64")
    assert cache_bytes(scheme, "dequant", shape) - cache_bytes(scheme, "packed", shape) == 2 * shape.quantized
    assert cache_bytes(QuantScheme.parse("bf16"), "dequant", shape) == 0


def test_muon_and_adamw_split_the_parameters():
    model, shape = converted("qwen3_moe", "w4a16:g64", "packed")
    from qarl_openrlhf.optim.groups import parameter_groups

    muon = dict(lr=1.0, momentum=0.9, nesterov=True, ns_steps=5, scale="spectral")
    adam = dict(lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    counted = {"muon": 0, "adamw": 0}
    for group in parameter_groups(model, muon, adam):
        counted[group["algorithm"]] += sum(p.numel() for p in group["params"])
    assert counted == {"muon": shape.matrices, "adamw": shape.parameters - shape.matrices}


def test_problem_names_the_largest_part_that_a_flag_lowers():
    parts = [Part("fixed", 30 * GIB, ("a", "b")), Part("small", 5 * GIB, ("a",), "--x"), Part("large", 9 * GIB, ("a",), "--y")]
    problem = Estimate("each GPU", parts).problem(40 * GIB)
    assert "'a'" in problem and "lower large (9.0 GiB): --y; or small (5.0 GiB): --x" in problem
    assert Estimate("each GPU", parts[:1]).problem(40 * GIB) is None


def test_tied_embeddings_count_once():
    model = make_model("qwen2", hidden=256, tied=True)
    report = convert_model(model, QuantScheme.parse("bf16"), cache="none")
    shape = ModelShape.of(model, report, model.config)
    assert shape.parameters == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert dataclasses.is_dataclass(shape) and next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kernel, dtype, chunk, a_logit, sums",
    [
        ("auto", "bf16", 0, 12, 0),
        ("auto", "bf16", 64, 2, 1),
        ("auto", "bf16", 512, 2, 1),  # a micro-batch that is one chunk has lm_head's gradient in float32 as well
        ("torch", "bf16", 64, 12, 1),
        ("auto", "fp16", 64, 12, 1),  # no kernel of ours: dispatch.on_card
    ],
)
def test_logits_of_a_chunk(kernel, dtype, chunk, a_logit, sums):
    _, shape = converted("qwen3", "w4a16:g64", "packed")
    args = N(actor=N(logprob_chunk=chunk), quant=N(kernel=kernel), ds=N(param_dtype=dtype))
    part = memory._logits(args, shape, 256, "training", "micro-batch")
    assert part.bytes == a_logit * shape.vocabulary * min(256, chunk or 256) + sums * 6 * shape.vocabulary * shape.hidden


def test_what_is_offloaded_is_counted_as_it_is_pinned():
    """By hand, for 2.5e9 weights of Muon and 0.5e9 of AdamW: 14 bytes a weight under ZeRO-3, two more under ZeRO-2, and what pinning adds."""
    counts = dict.fromkeys((field.name for field in dataclasses.fields(ModelShape)), 1)
    # Ten matrices of 0.25e9 with an embedding before and an lm_head behind them.
    tensors = ((25 * 10**7, False), *[(25 * 10**7, True)] * 10, (25 * 10**7, False))
    shape = ModelShape(**(counts | {"parameters": 3 * 10**9, "matrices": 25 * 10**8, "tensors": tensors}))

    def args(stage: int, stays: bool = False, sleeps: bool = False, gpus: int = 1) -> N:
        ds = N(zero_stage=stage, adam_offload=not stays, enable_sleep=sleeps, ring_attn_size=1, tensor_parallel_size=1)
        return N(ds=ds, actor=N(optim="muon", num_nodes=1, num_gpus_per_node=gpus))

    assert [offload.pinned(size) for size in (0, 1, 3, 4, 5)] == [0, 1, 4, 4, 8]
    assert offload.offloaded(args(3, stays=True), shape) == 0
    states = 4 * (25 + 2 * 5) * 10**8  # one moment of Muon's, two of AdamW's
    assert offload.offloaded(args(3), shape, pin=int) == states + (4 + 4 + 2) * 3 * 10**9
    assert offload.offloaded(args(2), shape, pin=int) == states + (4 + 4 + 2 + 2) * 3 * 10**9 + 2
    # FP32 gradients in pieces of 1e9 weights, two whole and a half, and AdamW's half; BF16 ones in one buffer.
    assert offload.offloaded(args(3), shape) == states + 4 * 3 * 10**9 + 2 * 2**32 + 2 * 2**31 + 2**33
    assert offload.offloaded(args(3, stays=True, sleeps=True), shape, pin=int) == states + (4 + 2) * 3 * 10**9
    # Whole tensors: a piece of 0.75e9 weights gets another that makes it 1.6e9, whose 6.4e9 bytes are pinned as 2^33.
    large = dataclasses.replace(shape, tensors=((25 * 10**7, False), *[(25 * 10**7, True)] * 3, (85 * 10**7, True), (9 * 10**8, True), (25 * 10**7, False)))
    assert [weights for weights, _ in offload.pieces(args(3), large)] == [16 * 10**8, 9 * 10**8, 5 * 10**8]
    assert offload.offloaded(args(3), large) == states + 4 * 3 * 10**9 + (2**33 + 2**32 + 2**31) + 2**33
    assert offload.offloaded(args(3, gpus=2), shape, pin=int) == offload.offloaded(args(3), shape, pin=int)  # of a node, whose ranks share it


def test_too_little_main_memory_is_told_where_the_run_would_be(monkeypatch):
    from qarl_openrlhf.planning import report

    huge = 2**60
    assert report.main_memory_notes(huge) == [] or torch.cuda.is_available()  # a plan for another machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (note,) = report.main_memory_notes(huge)
    assert "this machine has" in note and memory.gib(huge) in note
    assert report.main_memory_notes(GIB) == []


def test_8_bit_moments_that_sleep_are_counted_as_such():
    counts = dict.fromkeys((field.name for field in dataclasses.fields(ModelShape)), 1)
    shape = ModelShape(**(counts | {"parameters": 2**30}))
    ds = N(zero_stage=2, adam_offload=False, enable_sleep=True, ring_attn_size=1, tensor_parallel_size=1)
    actor = N(optim="adam", num_nodes=1, num_gpus_per_node=1, adam=N(state_bits=8))
    floats, gradients, moments = 4 * 2**30, 2 * 2**30, 2 * (2**30 + 2**24)
    assert offload.offloaded(N(ds=ds, actor=actor), shape) == floats + gradients + moments
    actor.adam.state_bits = 32
    assert offload.offloaded(N(ds=ds, actor=actor), shape) == floats + gradients + 2 * 4 * 2**30


def test_a_bucket_of_gradients_is_no_larger_than_the_model():
    def bucket(weights: int, stage: int, overlap: bool) -> int:
        phases = memory.PHASES
        parts = memory._gradients(weights, 1000, 1, stage, False, overlap, phases, phases, "")
        return next(part.bytes for part in parts if part.name == "reduce bucket")

    assert bucket(135 * 10**6, 3, False) == 2 * 135 * 10**6
    assert bucket(135 * 10**6, 2, True) == 2 * 2 * 135 * 10**6
    assert bucket(8 * 10**9, 3, True) == 2 * 500_000_000
