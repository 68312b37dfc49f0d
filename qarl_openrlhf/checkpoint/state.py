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
