"""The whole system on a tiny mixture-of-experts model trained with Muon: the paper's model class and its only optimizer."""

import glob
import os

import pytest
from safetensors.torch import load_file

from qarl_openrlhf import runtime
from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.report import load_run

from .conftest import argv

pytestmark = pytest.mark.slow

RUNS = {
    "w4a16-zero3-colocated": dict(scheme="w4a16:g32", zero=3, colocated=True),
    "w4a16-zero2-two-learners": dict(scheme="w4a16:g32", zero=2, ranks=2),
    "w8a8-zero1": dict(scheme="w8a8", zero=1),
}


@pytest.fixture(scope="module", autouse=True)
def ray_head():
    import ray

    environment = runtime.set_environment("cpu")
    runtime.start_ray("cpu", runtime.ResourcePlan({"actor": 4}), environment, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("name", RUNS)
def test_two_steps(name, tiny_model, flags):
    run = RUNS[name]
    wanted = flags(tiny_model("qwen3_moe", hidden=128), name) | {
        "quant.scheme": run["scheme"],
        "ds.zero_stage": run["zero"],
        "train.colocate_all": run.get("colocated", False),
        "actor.num_gpus_per_node": run.get("ranks", 1),
        "actor.gradient_checkpointing_enable": run["zero"] == 3,
        "actor.optim": "muon",
        "actor.muon.lr": 1e-3,
        "sync.verify": "readback",
        "objective.name": "tbpo",
    }
    train_qarl.main(argv(wanted))
    rows = load_run(wanted["ckpt.output_dir"]).rows
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["sync/checksum_ok"] == 1.0
        # r is exactly 1 before the first update: every response is in band
        assert row["objective/in_band_frac_by_update/0"] == 1.0
        # In BF16 rounding now and then chooses another expert, which moves a token by tenths.
        assert row["mismatch/router_topk_agreement"] > 0.9
        assert row["mismatch/abs_logp_mean"] < 0.15
    assert rows[-1]["sync/changed_code_frac"] > 0
    (export,) = glob.glob(os.path.join(wanted["ckpt.output_dir"], "quantized-*", "*.safetensors"))
    names = load_file(export)
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale" in names and not any("gate_up" in name for name in names)
