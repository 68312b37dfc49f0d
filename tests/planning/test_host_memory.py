"""Main memory of CPU runs: the estimate against what whole runs were measured to hold, and what it says of machines too small."""

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.optim.exchange import peak_bytes
from qarl_openrlhf.planning import host_memory, machine
from qarl_openrlhf.planning.architecture import meta_model
from qarl_openrlhf.planning.host_memory import GIB, LOGITS, host_parts, host_report
from qarl_openrlhf.planning.learner_memory import micro_batch_tokens
from qarl_openrlhf.planning.memory import estimate
from qarl_openrlhf.planning.model_shape import ModelShape, layer_activations
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.scheme import QuantScheme
from tests.e2e.conftest import argv, flags, prompts, tiny_model  # noqa: F401  fixtures

SMOLLM2_135M = LlamaConfig(
    hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True
)  # fmt: skip
QUICKSTART = {"quant.scheme": "w4a16:g64", "data.max_len": 64, "train.batch_size": 16, "train.micro_batch_size": 16}


def resolved(flags: dict):  # noqa: F811
    return train_qarl.resolve(argv(flags))[0]


def shape_of(args, config) -> ModelShape:
    model = meta_model(config, "a model")
    return ModelShape.of(model, convert_model(model, QuantScheme.parse(args.quant.scheme), cache=args.quant.cache), config)


def total(args, config) -> float:
    return sum(part.bytes for part in host_parts(args, shape_of(args, config))) / GIB


@pytest.fixture
def quickstart(flags, tiny_model):  # noqa: F811
    return resolved(flags(tiny_model("qwen3", hidden=128)) | QUICKSTART)


def test_the_quickstart_is_estimated_as_it_was_measured(quickstart, monkeypatch):
    """9.28 GiB over all processes at the fullest moment, two cores with AMX; its learner alone 5.05."""
    monkeypatch.setattr(host_memory, "cpu_multiplies_bf16", lambda: True)  # as there: products read BF16 copies
    assert 9.28 <= total(quickstart, SMOLLM2_135M) <= 1.12 * 9.28  # more, as a push and an optimizer step are counted at once
    learner = ("learner", "BF16 parameters", "optimizer", "quantization", "activations")
    parts = host_parts(quickstart, shape_of(quickstart, SMOLLM2_135M))
    assert sum(part.bytes for part in parts if part.name.startswith(learner)) / GIB == pytest.approx(5.05, rel=0.1)


def test_flags_move_the_part_that_they_are_about(flags, tiny_model, monkeypatch):  # noqa: F811
    base = flags(tiny_model("qwen3", hidden=128)) | QUICKSTART

    def parts(**changes) -> dict[str, int]:
        args = resolved(base | {name.replace("__", "."): value for name, value in changes.items()})
        return {part.name: part.bytes for part in host_parts(args, shape_of(args, SMOLLM2_135M))}

    before = parts()
    assert parts(train__micro_batch_size=4)["activations, logits"] == before["activations, logits"] / 4
    whole, chunked = before["activations, logits"], parts(actor__logprob_chunk=16)["activations, logits"]
    tokens = micro_batch_tokens(resolved(base))  # lm_head's gradient is summed in float32 beside a chunk's
    assert whole - chunked == 12 * 49152 * (tokens - 16) - 6 * 49152 * 576
    assert parts(actor__logprob_chunk=10 * tokens)["activations, logits"] == whole + 6 * 49152 * 576  # one chunk is summed, too
    assert parts(quant__cache="packed").keys() - before.keys() == {"quantization cache (packed)"}
    assert parts(quant__cache="packed")["quantization cache (packed)"] < before["quantization cache (dequant)"]
    assert parts(vllm__num_engines=2)["KV cache"] == 2 * before["KV cache"] == 2 * GIB
    assert parts(actor__num_gpus_per_node=2)["BF16 parameters"] == 2 * before["BF16 parameters"]
    sharded = parts(actor__num_gpus_per_node=2, ds__zero_stage=3)
    assert sharded["BF16 parameters"] == before["BF16 parameters"]
    assert sharded["optimizer state, gradients"] == before["optimizer state, gradients"]
    assert any(name.startswith("reference") for name in parts(algo__kl__init_coef=0.1))
    monkeypatch.setenv(host_memory.KV_VARIABLE, "0.5")
    assert parts()["KV cache"] == GIB // 2


QWEN3_1_7B = Qwen3Config(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("scheme, linears", [("bf16", 2 + 4), ("w4a16", 0.5 + 2 / 128 + 4), ("w8a8", 1 + 4)])
def test_an_engine_keeps_float32_copies_where_the_cpu_multiplies_no_bf16(quickstart, scheme, linears, monkeypatch):
    """By hand: all linear layers of the decoder, and lm_head in every scheme (engine.cpu_method)."""
    monkeypatch.setattr(host_memory, "cpu_multiplies_bf16", lambda: False)
    quickstart.quant.scheme, quickstart.vllm.num_engines = scheme, 2
    shape = shape_of(quickstart, QWEN3_1_7B)
    (held,) = [part.bytes for part in host_parts(quickstart, shape) if part.name == "engine weights"]
    matrices = 28 * (2048 * 128 * (16 + 2 * 8 + 16) + 3 * 2048 * 6144)
    assert shape.matrices == matrices
    assert held == pytest.approx(2 * (linears * matrices + 2 * (shape.parameters - matrices) + 4 * 151936 * 2048), rel=1e-6)
    monkeypatch.setattr(host_memory, "cpu_multiplies_bf16", lambda: True)
    (as_they_are,) = [part.bytes for part in host_parts(quickstart, shape) if part.name == "engine weights"]
    assert as_they_are == held - 2 * 4 * 151936 * 2048 - 2 * {"bf16": 4, "w4a16": 2, "w8a8": 0}[scheme] * matrices


def test_codes_average_and_whole_matrices_are_counted(quickstart, monkeypatch):
    monkeypatch.setattr(host_memory, "cpu_multiplies_bf16", lambda: True)
    shape = shape_of(quickstart, SMOLLM2_135M)

    def parts(scheme: str, **changes) -> dict[str, int]:
        quickstart.quant.scheme = scheme
        for name, value in changes.items():
            group, _, flag = name.partition("__")
            setattr(getattr(quickstart, group), flag, value)
        return {part.name: part.bytes for part in host_parts(quickstart, shape)}

    assert parts("w4a16")["codes of earlier pushes"] == shape.quantized  # half a byte each, of the first and the last push
    assert parts("w8a8")["codes of earlier pushes"] == 2 * shape.quantized
    assert not {"codes of earlier pushes", "moving average", "whole matrices (Muon)"} & parts("bf16").keys()
    p = shape.parameters
    assert parts("bf16", train__enable_ema=True, actor__num_gpus_per_node=2, ds__zero_stage=2)["moving average"] == (2 * 2 + 4) * p
    assert parts("bf16", ds__zero_stage=3)["moving average"] == (2 + 4) * p
    assert parts("bf16", actor__optim="muon")["whole matrices (Muon)"] == 2 * peak_bytes(shape.stacks, shape.matrices, 2)
    assert set(shape.stacks) == {(1, 576, 576), (1, 192, 576), (1, 1536, 576), (1, 576, 1536)}


def test_rows_sorted_by_expert_are_counted_as_on_a_gpu(quickstart):
    """Two of four experts a token: beside what a dense layer keeps, three sets of two rows of hidden features."""
    config = Qwen3MoeConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=128, vocab_size=1000,
    )  # fmt: skip
    shape, tokens = shape_of(quickstart, config), micro_batch_tokens(quickstart)

    def activations(shape) -> int:
        (held,) = [part.bytes for part in host_parts(quickstart, shape) if part.name == "activations, logits"]
        return held

    assert shape.experts_hidden == 2 * 256 and not quickstart.actor.gradient_checkpointing_enable
    assert activations(shape) - activations(replace(shape, experts_hidden=0)) == 3 * 2 * tokens * 3 * 2 * 256
    logits = LOGITS * tokens * 1000
    on_a_gpu = {part.name: part.bytes for part in estimate(quickstart, shape)[0].parts}["activations"]
    assert (activations(shape) - logits) / 3 == on_a_gpu / 4 == layer_activations(shape, tokens)  # there with a layer at work


def test_a_machine_too_small_is_named_with_what_would_help(quickstart):
    shape = shape_of(quickstart, SMOLLM2_135M)
    table, problems = host_report(quickstart, shape, machine=4 * GIB)
    assert "of the machine's 4.0 GiB" in table and len(problems) == 1
    assert "this machine has 4.0 GiB: lower activations, logits" in problems[0] and "--train.micro_batch_size" in problems[0]
    assert host_report(quickstart, shape, machine=64 * GIB)[1] == []


def test_a_kv_cache_too_small_for_one_response(quickstart, monkeypatch):
    monkeypatch.setenv(host_memory.KV_VARIABLE, "0.001")
    assert "raise VLLM_CPU_KVCACHE_SPACE" in host_report(quickstart, shape_of(quickstart, SMOLLM2_135M), machine=64 * GIB)[1][0]


def test_this_machine_has_no_more_memory_than_the_kernel_says():
    assert 0 < machine.machine_bytes() <= psutil.virtual_memory().total


@pytest.mark.slow
def test_a_real_run_holds_what_was_estimated(flags, tiny_model):  # noqa: F811
    wanted = flags(tiny_model("qwen3", hidden=128)) | {"quant.scheme": "w4a16:g32", "objective.name": "tbpo"}
    args = resolved(wanted)
    estimated = total(args, train_qarl.positions.load_config(args))
    run = subprocess.Popen([sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", *argv(wanted)], stdout=subprocess.DEVNULL)
    peak = 0
    while run.poll() is None:
        peak = max(peak, proportional_set(run.pid))
        time.sleep(0.5)
    assert run.returncode == 0
    assert estimated == pytest.approx(peak / GIB, rel=0.25)


def proportional_set(pid: int) -> int:
    """Bytes of a process and all below it, pages that several share counted once."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    held = 0
    for process in family:
        try:
            held += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return held
