"""A run with an NF4 reference model and 8-bit moments."""

import subprocess
import sys

import pytest

from qarl_openrlhf.report import load_run
from tests.overlay import with_packages

from .conftest import argv

pytestmark = pytest.mark.slow


def test_nf4_reference_and_8_bit_moments(tiny_model, flags, tmp_path, tmp_path_factory):
    environment = with_packages("bitsandbytes", "bitsandbytes", tmp_path_factory.mktemp("bitsandbytes"))
    # the policy in BF16: before the first update it is the BF16 reference (KL 0), and not the NF4 one
    run = flags(tiny_model("qwen3", hidden=128)) | {"algo.kl.init_coef": 0.01, "algo.kl.estimator": "k3"}
    run |= {"ref.load_in_4bit": True, "actor.adam.state_bits": 8}
    command = [sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", *argv(run)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    steps, kl = load_run(run["ckpt.output_dir"]).series("kl")
    assert len(steps) == 2 and all(5e-4 < value < 1.0 for value in kl), kl
