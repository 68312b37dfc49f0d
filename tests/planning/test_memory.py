"""The estimate against what is measured: the cache's own bytes, the published tensors, the optimizer of the recipe."""

import dataclasses
import json
from types import SimpleNamespace as N

import pytest
import torch

from qarl_openrlhf.bench import sync, sync_room
from qarl_openrlhf.bench.step_plan import Model
from qarl_openrlhf.optim.exchange import peak_bytes
from qarl_openrlhf.planning import learner_memory, memory, offload
from qarl_openrlhf.planning.model_shape import ModelShape, cache_bytes, packed_bytes
from qarl_openrlhf.planning.parts import GIB, Estimate, Part
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
    "kernel, chunk, a_logit, sums",
    [
        ("auto", 0, 12, 0),
        ("auto", 64, 2, 1),
        ("auto", 512, 2, 1),  # a micro-batch that is one chunk has lm_head's gradient in float32 as well
        ("torch", 64, 12, 1),
    ],
)
def test_logits_of_a_chunk(kernel, chunk, a_logit, sums):
    _, shape = converted("qwen3", "w4a16:g64", "packed")
    args = N(actor=N(logprob_chunk=chunk), quant=N(kernel=kernel))
    part = learner_memory._logits(args, shape, 256, "training", "micro-batch")
    assert part.bytes == a_logit * shape.vocabulary * min(256, chunk or 256) + sums * 6 * shape.vocabulary * shape.hidden


def test_what_is_offloaded_is_counted_as_it_is_pinned():
    """By hand, for 2.5e9 weights of Muon and 0.5e9 of AdamW: 14 bytes a weight under ZeRO-3, two more under ZeRO-2, and what pinning adds."""
    counts = dict.fromkeys((field.name for field in dataclasses.fields(ModelShape)), 1)
    # Ten matrices of 0.25e9 with an embedding before and an lm_head behind them.
    tensors = ((25 * 10**7, False), *[(25 * 10**7, True)] * 10, (25 * 10**7, False))
    shape = ModelShape(**(counts | {"parameters": 3 * 10**9, "matrices": 25 * 10**8, "tensors": tensors}))

    def args(stage: int, stays: bool = False, sleeps: bool = False, gpus: int = 1) -> N:
        ds = N(zero_stage=stage, adam_offload=not stays, enable_sleep=sleeps)
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
    ds = N(zero_stage=2, adam_offload=False, enable_sleep=True)
    actor = N(optim="adam", num_nodes=1, num_gpus_per_node=1, adam=N(state_bits=8))
    floats, gradients, moments = 4 * 2**30, 2 * 2**30, 2 * (2**30 + 2**24)
    assert offload.offloaded(N(ds=ds, actor=actor), shape) == floats + gradients + moments
    actor.adam.state_bits = 32
    assert offload.offloaded(N(ds=ds, actor=actor), shape) == floats + gradients + 2 * 4 * 2**30


def test_a_bucket_of_gradients_is_no_larger_than_the_model():
    def bucket(weights: int, stage: int, overlap: bool) -> int:
        phases = memory.PHASES
        parts = learner_memory._gradients(weights, 1000, 1, stage, False, overlap, phases, phases, "")
        return next(part.bytes for part in parts if part.name == "reduce bucket")

    assert bucket(135 * 10**6, 3, False) == 2 * 135 * 10**6
    assert bucket(135 * 10**6, 2, True) == 2 * 2 * 135 * 10**6
    assert bucket(8 * 10**9, 3, True) == 2 * 500_000_000


def apart(**changes) -> N:
    """An 8B on eight GPUs, four that learn and four that sample, by flags that the estimate reads."""
    args = N(
        quant=N(scheme="w4a16", cache="packed", kernel="auto"), sync=N(bucket_mb=256), data=N(max_len=4096), algo=N(kl=N(init_coef=0)),
        ds=N(zero_stage=3, adam_offload=False, enable_sleep=False, overlap_comm=False),
        actor=N(num_nodes=1, num_gpus_per_node=4, optim="adam", gradient_checkpointing_enable=True, logprob_chunk=2048, adam=N(state_bits=32)),
        vllm=N(num_engines=4, tensor_parallel_size=1, gpu_memory_utilization=0.95, enable_sleep=False, engine_args="{}"),
        train=N(colocate_all=False, async_enable=False, dynamic_batch_enable=True, micro_batch_size=1, max_tokens_per_gpu=8192, enable_ema=False),
        critic=N(model_name_or_path=None), reward=N(remote_url="x"),
    )  # fmt: skip
    for name, value in changes.items():
        group, _, flag = name.partition("__")
        setattr(getattr(args, group), flag, value)
    return args


def shape_8b(scheme: str) -> ModelShape:
    return Model.of("8b", None, scheme).shape


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "fp8"])
@pytest.mark.parametrize("tp, bucket_mb", [(1, 256), (2, 4096)])
def test_an_engine_of_its_own_has_the_buffers_of_a_push(scheme, tp, bucket_mb):
    """As much as bench_sync counts for its engine."""
    cache = sync.ENGINE["kv_cache_memory_bytes"]
    args = apart(
        quant__scheme=scheme, sync__bucket_mb=bucket_mb, vllm__tensor_parallel_size=tp,
        vllm__engine_args=json.dumps({"kv_cache_memory_bytes": cache, "max_num_seqs": 128}),
    )  # fmt: skip
    shape = shape_8b(scheme)
    estimates = memory.estimate(args, shape)
    memory.complete(estimates, args, shape, 80 * GIB)
    engine = estimates[1]
    wanted = sync_room.engine_bytes(N(shape="8b", layers=None, tp=tp, bucket_mb=bucket_mb), scheme)
    assert engine.peak == "publish" and engine.total("publish") == pytest.approx(wanted, abs=2)
    staging = 2 * max(bucket_mb * 2**20, 2 * 151936 * 4096)  # lm_head travels whole
    assert wanted - engine.total("rollout") == memory.rebuilt_bytes(shape, tp)
    assert {part.name: part.bytes for part in engine.parts}["sync buffers (engine)"] == staging


def test_a_share_that_leaves_no_room_for_the_first_push_is_named_with_one_that_does():
    args, shape = apart(), shape_8b("w4a16")

    def engine(**changes) -> tuple[Estimate, str | None]:
        for flag, value in changes.items():
            setattr(args.vllm, flag, value)
        estimates = memory.estimate(args, shape)
        assert memory.complete(estimates, args, shape, 80 * GIB) == []
        return estimates[1], estimates[1].problem(80 * GIB)

    before, problem = engine()
    assert before.total("publish") == pytest.approx(0.95 * 80 * GIB + 2.68 * GIB, rel=0.001)
    assert "in phase 'publish'" in problem and "lower KV cache" in problem
    named = float(problem.partition("--vllm.gpu_memory_utilization ")[2].split(";")[0])
    assert engine(gpu_memory_utilization=named)[1] is None
    assert engine(gpu_memory_utilization=named + 0.01)[1] is not None
    fixed = json.dumps({"kv_cache_memory_bytes": 75 * GIB})
    assert "a smaller kv_cache_memory_bytes of --vllm.engine_args" in engine(engine_args=fixed)[1]
    estimates = memory.estimate(args, shape)
    assert memory.complete(estimates, args, shape, 10 * GIB)[-1:] == []  # a fixed cache; nothing to compute a share from


def test_a_colocated_engine_has_the_learners_buffers():
    args, shape = apart(train__colocate_all=True, vllm__enable_sleep=True), shape_8b("w4a16")
    (both,) = memory.estimate(args, shape)
    assert [part.name for part in both.parts if part.name.startswith("sync buffers")] == ["sync buffers (rank 0)"]
    assert [part.phases for part in both.parts if part.name.startswith("a layer brought")] == [("publish",)]


def test_muon_puts_whole_matrices_together_in_the_optimizer_step():
    args, shape = apart(actor__optim="muon"), shape_8b("w4a16")
    learner = memory.estimate(args, shape)[0]
    (part,) = [part for part in learner.parts if part.name == "whole matrices (Muon)"]
    assert part.phases == ("optimizer step",) and part.bytes == peak_bytes([(1, 12288, 4096)], shape.matrices, 4)
    args.actor.optim = "adam"
    assert not any(part.name == "whole matrices (Muon)" for part in memory.estimate(args, shape)[0].parts)


def test_a_moving_average_is_on_every_gpu_or_under_zero_3_in_main_memory():
    args, shape = apart(), shape_8b("w4a16")
    host = memory.estimate(args, shape)[0].host
    args.train.enable_ema = True

    def average() -> tuple[int, int]:
        learner = memory.estimate(args, shape)[0]
        return {part.name: part.bytes for part in learner.parts}.get("moving average", 0), learner.host - host

    p = shape.parameters
    device, main = average()
    assert device == 0 and main == pytest.approx((2 + 4) * p, rel=0.2)  # pinned, tensor by tensor
    assert offload.average_bytes(args, shape, pin=int)[1] == pytest.approx((2 + 4) * p, rel=1e-4)
    args.ds.zero_stage = 2
    assert average() == (2 * p + 4 * p // 4, 0)
