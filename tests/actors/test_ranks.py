"""Two learner ranks take the optimizer step that one takes with all responses: normalisation over ranks, in every kind of mean."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.tiny_models import save_tiny_model

from . import step_worker
from .test_memory import ENVIRONMENT

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[int, dict]:
    """{ranks: what step_worker wrote}."""
    model, out = save_tiny_model(tmp_path_factory.mktemp("model"), "llama", hidden=128), tmp_path_factory.mktemp("steps")
    workers = []
    for world in (1, 2):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        for rank in range(world):
            command = [sys.executable, step_worker.__file__, str(rank), str(world), port, model, str(out / str(world))]
            path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
            workers.append(
                subprocess.Popen(
                    command, env=os.environ | ENVIRONMENT | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
    logs = [worker.communicate(timeout=500)[0] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), "\n".join(log[-3000:] for log in logs)
    return {world: torch.load(out / str(world)) for world in (1, 2)}


@pytest.mark.parametrize("name", step_worker.SETTINGS)
def test_two_ranks_take_the_step_of_one(steps, name):
    (norm, moved), (their_norm, their_moved) = steps[1][name], steps[2][name]
    assert their_norm == pytest.approx(norm, rel=0.01)
    # AdamW's first step is the gradient's sign: what has hardly a gradient may round to either.
    alike = [(moved[n].sign() == their_moved[n].sign()).float().mean() for n in moved if moved[n].dim() == 2]
    assert min(alike) > 0.9 and sum(alike) / len(alike) > 0.97
