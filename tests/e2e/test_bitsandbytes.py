"""A run with an NF4 reference model and 8-bit moments, beside the same run without, each in a process of its own."""

import subprocess
import sys

import pytest

from qarl_openrlhf.report import load_run
from tests.overlay import ROOT, with_packages

from .conftest import argv

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return with_packages("bitsandbytes", "bitsandbytes", tmp_path_factory.mktemp("bitsandbytes"))


@pytest.mark.parametrize("stage", [2, 3])
def test_nf4_reference_and_8_bit_moments(tiny_model, flags, environment, stage, tmp_path):
    kl = {}
    for name, low_bit in (("plain", {}), ("low", {"ref.load_in_4bit": True, "actor.adam.state_bits": 8})):
        # the policy in BF16: before the first update it is the BF16 reference, and not the NF4 one
        run = (
            flags(tiny_model("qwen3"), name)
            | {"ds.zero_stage": stage, "algo.kl.init_coef": 0.01, "algo.kl.estimator": "k3"}
            | low_bit
        )
        command = [sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", *argv(run)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=560)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        steps, kl[name] = load_run(run["ckpt.output_dir"]).series("kl")
        assert len(steps) == 2
    assert abs(kl["plain"][0]) < 1e-3 < 5e-3 < kl["low"][0] < 1.0, kl
