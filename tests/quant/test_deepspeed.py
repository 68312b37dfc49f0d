"""Real DeepSpeed ZeRO-1, 2 and 3 on gloo: the same packed bytes, one quantization a step, FP32 copies that accumulate."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.packing import quantize_weight
from tests.quant import shard_edges_worker, zero_worker
from tests.quant.shard_edges_worker import Layers
from tests.ranks import Ranks
from tests.tiny_models import LINEARS, MOE_LAYERS

def run_workers(world: int, directory: Path, main: Callable = zero_worker.main) -> list[dict]:
    out = str(directory / "result.pt")
    Ranks(main, world, out).wait(300)
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_workers(1, tmp_path_factory.mktemp("zero"))[0]


@pytest.fixture(params=["dense", "moe"])
def kind(request):
    return request.param


@pytest.fixture
def runs(results, kind):
    return results[kind]


LAYERS = {"dense": LINEARS, "moe": MOE_LAYERS}
STAGES = ["zero1", "zero2", "zero3"]


def assert_same_bytes(a: dict, b: dict):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("stage", STAGES)
def test_quantized_once_an_optimizer_step(runs, stage, kind):
    """Publish, two micro-batches with checkpointing and a step, publish, two micro-batches."""
    layers = LAYERS[kind]
    assert runs[stage]["calls"] == [layers, layers, 2 * layers, 2 * layers]


@pytest.mark.parametrize("stage", STAGES)
def test_the_step_trained_and_changed_codes(runs, stage):
    losses, (changed, total) = runs[stage]["losses"], runs[stage]["changed"]
    assert losses[2] < losses[0] and losses[3] < losses[1]
    assert 0.001 < changed / total < 0.5


def test_the_same_packed_bytes_after_a_step(runs):
    for stage in ("zero2", "zero3"):
        assert_same_bytes(runs["zero1"]["published_before"], runs[stage]["published_before"])
        assert runs[stage]["report"] == runs["zero1"]["report"]
        assert_same_bytes(runs["zero1"]["published"], runs[stage]["published"])
        assert runs[stage]["losses"] == runs["zero1"]["losses"]


def assert_almost_the_same_codes(a: dict, b: dict):
    packed = [name for name in a if name.endswith("weight_packed")]
    differ = sum((a[name] != b[name]).sum().item() for name in packed)
    assert differ < 0.01 * sum(a[name].numel() for name in packed)


def test_zero3_parameters_were_partitioned_and_a_hit_did_not_need_them(runs):
    assert runs["zero1"]["partitioned"] == 0 and runs["zero3"]["partitioned"] > 20
    assert runs["zero3"]["gone"]


def assert_only_what_is_read_was_gathered(run: dict, layers: int):
    (held, nothing, away), (plain, whole, none_away) = run["without"][True], run["without"][False]
    assert nothing == {0} and away == layers
    assert 0 not in whole and none_away == 0
    assert len(held) == 4 and all(torch.equal(a, b) for a, b in zip(held, plain, strict=True))
    there, away = run["stale"]
    assert 0 not in there and away == 0  # the weights have moved: they are gathered, to be quantized


def test_a_pass_without_gradients_gathers_no_weight_that_is_packed(runs, kind):
    """Four passes each: in the third and fourth, DeepSpeed fetches ahead. What is trained after them is that of the other stages, above."""
    assert_only_what_is_read_was_gathered(runs["zero3"], LAYERS[kind])


def test_a_thousand_updates_of_1e_6_change_codes(results):
    small = results["small updates"]
    assert small["lost_in_bf16"] > 0.9 and small["one"] == 0  # a BF16 master weight would never move
    assert small["thousand"] > 40  # of 4096


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_workers(2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
def test_two_ranks_publish_the_same_bytes(two_ranks, kind):
    first, second = (rank[kind] for rank in two_ranks)
    layers = LAYERS[kind]
    for stage in STAGES:
        assert first[stage]["calls"] == second[stage]["calls"] == [layers, layers, 2 * layers, 2 * layers]
        assert_same_bytes(first[stage]["published"], second[stage]["published"])
        assert first[stage]["losses"][:2] != second[stage]["losses"][:2]  # different data
    for rank in (first, second):
        assert_only_what_is_read_was_gathered(rank["zero3"], layers)
    for stage in ("zero2", "zero3"):
        # The stages sum two ranks' gradients in different orders, so BF16 weights may differ by a last bit.
        assert_almost_the_same_codes(first["zero1"]["published"], first[stage]["published"])


@pytest.mark.slow
def test_shards_that_end_within_a_group_split_no_group(tmp_path):
    """ZeRO-3 cuts a flat parameter anywhere; what is quantized is the gathered one, so groups and rows stay whole."""
    ranks = run_workers(2, tmp_path, shard_edges_worker.main)
    for text, mine in ranks[0].items():
        scheme = QuantScheme.parse(text)
        for name, weight in mine["weights"].items():
            edge = mine["shards"][name]
            assert 2 * edge == weight.numel() and edge % 32 == 16 and edge % weight.shape[1], "this edge splits nothing"
            wanted = quantize_weight(weight, scheme)
            for suffix, tensor in wanted.tensors().items():
                for rank in ranks:
                    sent = rank[text]["published"][f"{name.removesuffix('.weight')}.{suffix}"]
                    assert torch.equal(sent, tensor), (name, suffix)
        assert not torch.equal(mine["weights"]["layers.0.up.weight"], Layers().layers[0]["up"].weight), "nothing was trained"
