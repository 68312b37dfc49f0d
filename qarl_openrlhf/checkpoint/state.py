"""What a process must remember besides DeepSpeed's state, to go on as if it had never stopped."""

import random
from pathlib import Path

import numpy
import torch


def random_state() -> dict:
    """State of every random generator of this process: Python's, NumPy's, PyTorch's on the CPU and on this process's GPU."""
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict) -> None:
    """Put back what :func:`random_state` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def rank_file(directory: Path, rank: int) -> Path:
    return directory / f"qarl_rank{rank}.pt"


def local_weights(model: torch.nn.Module, *, rank: int) -> dict[str, torch.Tensor]:
    """Weights of a model that DeepSpeed writes no checkpoint of, the moving average: this rank's shards under ZeRO-3, else all
    of them on rank 0 and none on the others."""
    if any(hasattr(p, "ds_tensor") for p in model.parameters()):
        return {name: p.ds_tensor.detach().cpu().clone() for name, p in model.named_parameters()}
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()} if rank == 0 else {}


def set_local_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put back what :func:`local_weights` returned (on rank 0, whose copy is the one that is saved, without ZeRO-3)."""
    for name, parameter in model.named_parameters():
        if name in weights:
            getattr(parameter, "ds_tensor", parameter).data.copy_(weights[name])
