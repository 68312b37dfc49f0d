"""AdamW's moments in 8 bits, under DeepSpeed with a quantized policy: what they are, what they cost, and that a run resumes."""

import socket
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


@pytest.mark.parametrize("stage, world", [(1, 1), (2, 2), (3, 2)])
def test_moments_of_8_bits(tmp_path, environment, stage, world):
    save_tiny_model(tmp_path / "out.model", "qwen3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.optim.adam8bit_worker"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), port, str(tmp_path / "out"), str(stage)], env=environment, cwd=ROOT)
        for rank in range(world)
    ]
    try:
        assert [rank.wait(500) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
    results = torch.load(tmp_path / "out.0")
    eight, full = results[8], results[32]
    assert (eight["class"], eight["dtypes"]) == ("AdamW8bit", {"torch.uint8"}) and "torch.float32" in full["dtypes"]
    assert eight["numbers"] == eight["bytes"] == full["bytes"] / 4
    assert eight["losses"][-1] < eight["losses"][0] - 0.5  # it trains
    assert eight["losses"] == pytest.approx(full["losses"], abs=0.05) and eight["losses"] != full["losses"]
    assert eight["losses"][3:] == eight["again"] and eight["same"]  # the second half from the checkpoint, bit for bit
    assert full["losses"][3:] == full["again"] and full["same"]
