"""AdamW inside Muon (embeddings, norms, routers): torch's own updates, and on a card no copy of the partition beside its states."""

import pytest
import torch
from torch import nn

from qarl_openrlhf.optim.muon import Muon

MUON = {"lr": 1e-2, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "scale": "match_rms"}
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WEIGHTS = 1 << 20
CARD = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])


def partition(device: str) -> tuple[Muon, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return Muon(nn.Linear(2, 2), MUON, ADAM), nn.Parameter(torch.randn(WEIGHTS, generator=generator).to(device))


@torch.no_grad()
def step(ours: Muon, flat: nn.Parameter, seed: int) -> None:
    flat.grad = torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(seed)).to(flat.device)
    ours._adamw(flat, ADAM)


@pytest.mark.parametrize("device", ["cpu", CARD])
def test_updates_are_those_of_torch_through_a_checkpoint(device):
    ours, flat = partition(device)
    theirs = nn.Parameter(flat.detach().clone())
    reference = torch.optim.AdamW([theirs], **ADAM, foreach=False)
    for seed in range(4):
        step(ours, flat, seed)
        theirs.grad = flat.grad.clone()
        reference.step()
        state = ours.state[flat]
        state["step"] = state["step"].cpu()  # where a checkpoint leaves it
    assert float(ours.state[flat]["step"]) == 4
    torch.testing.assert_close(flat, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", [CARD])
def test_a_step_takes_no_memory_of_the_partitions_size(device):
    ours, flat = partition(device)
    step(ours, flat, 0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        ours._adamw(flat, ADAM)
    assert torch.cuda.max_memory_allocated() - before < WEIGHTS  # bytes: a float32 copy would be four times that
