"""Main memory of CPU runs: the estimate against what whole runs were measured to hold, and what it says of machines too small."""

import subprocess
import sys
import time

import psutil
import pytest
from transformers import LlamaConfig

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.planning import host_memory
from qarl_openrlhf.planning.architecture import meta_model
from qarl_openrlhf.planning.host_memory import GIB, host_parts, host_report
from qarl_openrlhf.planning.memory import ModelShape, micro_batch_tokens
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
    assert total(quickstart, SMOLLM2_135M) == pytest.approx(9.28, rel=0.1)
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
    assert 0 < host_memory.machine_bytes() <= psutil.virtual_memory().total


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
