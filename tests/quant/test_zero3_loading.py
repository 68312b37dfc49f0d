"""A checkpoint of experts is held once while it is loaded under ZeRO-3, not once a process, and gives the same model."""

import torch

from tests.optim.muon_worker import model_directory
from tests.quant import zero3_load_worker
from tests.ranks import Ranks


def test_only_rank_0_holds_the_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    model_directory(f"{out}.model")
    Ranks(zero3_load_worker.main, 2, str(out)).wait(300)
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
