"""A checkpoint of experts is held once while it is loaded under ZeRO-3, not once a process, and gives the same model."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from tests.optim.muon_worker import model_directory

ROOT = Path(__file__).parents[2]


def test_only_rank_0_holds_the_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    model_directory(f"{out}.model")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.quant.zero3_load_worker"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", port, str(out)], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-3000:] for error in errors)
    first, second = (torch.load(f"{out}.{rank}", weights_only=False) for rank in range(2))
    assert first["seen"] == [] and second["seen"] == [{"meta"}]
    whole = AutoModelForCausalLM.from_pretrained(f"{out}.model", dtype=torch.bfloat16)
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for rank in (first, second):
        assert rank["patched"].keys() == rank["plain"].keys() == expected.keys()
        for name, tensor in expected.items():
            if not name.endswith("inv_freq"):  # DeepSpeed's bf16 makes buffers BF16; patches/rotary.py puts them right
                assert torch.equal(rank["patched"][name], tensor) and torch.equal(rank["plain"][name], tensor), name
            assert torch.equal(rank["patched"][name], rank["plain"][name]), name
