"""The recipes' placement: learner and engine take turns on one card, each out of the way (weights, KV cache, optimizer) meanwhile.

One run after the other: vLLM refuses to sleep where the card's free memory shrinks meanwhile.
"""

import pytest

from .runs import assert_aligned, rows_of, save_models, side_by_side

ASLEEP = {"vllm.enable_sleep": True, "ds.enable_sleep": True, "sync.probe_every": 1}
MUON = {"actor.optim": "muon", "actor.muon.lr": 1e-4}
RUNS = {
    "w4a16-adam-zero2": ASLEEP | {"quant.scheme": "w4a16", "ds.zero_stage": 2},
    "w4a16-adam-zero3": ASLEEP | {"quant.scheme": "w4a16", "ds.zero_stage": 3},
    "fp8-muon-zero3": ASLEEP | MUON | {"quant.scheme": "fp8", "ds.zero_stage": 3},
    "w4a16-muon-zero2": ASLEEP | MUON | {"quant.scheme": "w4a16", "ds.zero_stage": 2},
    "moe-w4a16-muon-offload": ASLEEP | MUON | {"quant.scheme": "w4a16", "ds.zero_stage": 3, "ds.adam_offload": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return save_models(tmp_path_factory)


@pytest.mark.parametrize("name", list(RUNS))
def test_learner_and_engine_take_turns(models, tmp_path_factory, name):
    with side_by_side({name: RUNS[name]}, models, tmp_path_factory) as finished:
        assert_aligned(rows_of(finished, name), name)
