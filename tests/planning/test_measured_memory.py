"""The learner's estimate beside what PyTorch's allocator counted on cards: the raw figures of benchmarks/results."""

import json
from pathlib import Path

import pytest

from qarl_openrlhf.bench import sync
from qarl_openrlhf.bench.step_learner import recipe_flags, resolve
from qarl_openrlhf.bench.step_workload import Workload
from qarl_openrlhf.planning import memory
from qarl_openrlhf.planning.architecture import meta_model
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.scheme import QuantScheme

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


BOTH = ("8b_1gpu", "8b_2gpu", "30b-a3b_1gpu", "30b-a3b_2gpu", "8b_zero3_2gpu", "30b-a3b_zero3_2gpu")
LATER = ("8b_zero2_2gpu_b", "8b_zero3_2gpu_b", "8b_overlap_2gpu", "30b-a3b_zero2_2gpu_b", "30b-a3b_zero3_2gpu_b")
RUNS = [*((name, scheme) for name in BOTH for scheme in ("bf16", "w4a16")), *((name, "w4a16") for name in LATER)]


@pytest.mark.parametrize("depth", [0, -1], ids=["shallow", "deep"])
@pytest.mark.parametrize("name, scheme", RUNS)
def test_a_learners_peak_is_within_15_percent(name, depth, scheme, tmp_path):
    """Micro-batches of as many tokens as the flags allow were estimated, of those there are by chance measured."""
    found = json.loads((RESULTS / f"step_{name}_h200.json").read_text())
    layers = sorted(piece["layers"] for key, piece in found["pieces"].items() if f"/{scheme}/" in key)[depth]
    measured = found["pieces"][f"learner/{scheme}/mixed/{layers}"]["peak_gib"] * memory.GIB
    settings, learner = found["settings"], found["learner"]

    config = sync.config_of(settings["shape"], layers)
    config.save_pretrained(tmp_path)
    workload = Workload(*(settings[key] for key in ("prompt", "response", "prompts", "samples", "update_samples")))
    flags = recipe_flags(workload, tokens=learner["tokens"], samples=settings["update_samples"], world=learner["world"])
    extra = [flag for flag in learner["flags"] if flag != "--ds.use_liger_kernel"]  # moves no memory of this size
    args = resolve(str(tmp_path), scheme, "cuda", flags, extra)
    shape = memory.ModelShape.of(model := meta_model(config, str(tmp_path)), convert_model(model, QuantScheme.parse(scheme)), config)
    estimate = memory.estimate(args, shape)[0]
    absent = ("sync buffers", "CUDA context", "engine", "KV cache", "a layer brought")  # there was no engine to push to
    estimate.parts = [part for part in estimate.parts if not part.name.startswith(absent)]
    assert measured == pytest.approx(estimate.total(estimate.peak), rel=0.15)
