"""--ref.load_in_4bit: the reference model's linear layers are bitsandbytes' NF4, at every ZeRO stage, and it is still that model."""

import subprocess
import sys

import pytest
import torch

from tests.overlay import ROOT, with_packages
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return with_packages("bitsandbytes", "bitsandbytes", tmp_path_factory.mktemp("bitsandbytes"))


@pytest.mark.parametrize("stage", ["2", "3"])
def test_reference_in_nf4(tmp_path, environment, stage):
    model = save_tiny_model(tmp_path / "model", "qwen3")
    command = [sys.executable, "-m", "tests.actors.reference_worker", model, str(tmp_path / "out.pt"), stage]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(tmp_path / "out.pt")
    plain, nf4 = results["bf16"], results["nf4"]
    assert "Linear4bit" in nf4["kinds"] and "Linear4bit" not in plain["kinds"]
    if stage == "2":  # ZeRO-3's parameters are empty outside of a forward
        assert nf4["bytes"] < 0.3 * plain["bytes"]
    difference = (nf4["log_probs"] - plain["log_probs"]).abs()
    assert 1e-3 < difference.mean() < 0.5 and not nf4["trained"]
    print(f"ZeRO-{stage}: mean |difference of log-probs| {difference.mean():.3f} nats")
