"""Two learner ranks take the optimizer step that one takes with all responses: normalisation over ranks, in every kind of mean."""

import pytest
import torch

from tests.ranks import Ranks
from tests.tiny_models import save_tiny_model

from . import step_worker


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[int, dict]:
    """{ranks: what step_worker wrote}."""
    model, out = save_tiny_model(tmp_path_factory.mktemp("model"), "llama", hidden=128), tmp_path_factory.mktemp("steps")
    groups = [Ranks(step_worker.main, world, model, str(out / str(world))) for world in (1, 2)]
    for group in groups:
        group.wait()
    return {world: torch.load(out / str(world)) for world in (1, 2)}


@pytest.mark.parametrize("name", step_worker.SETTINGS)
def test_two_ranks_take_the_step_of_one(steps, name):
    (norm, moved), (their_norm, their_moved) = steps[1][name], steps[2][name]
    assert their_norm == pytest.approx(norm, rel=0.01)
    # AdamW's first step is the gradient's sign: what has hardly a gradient may round to either.
    alike = [(moved[n].sign() == their_moved[n].sign()).float().mean() for n in moved if moved[n].dim() == 2]
    assert min(alike) > 0.9 and sum(alike) / len(alike) > 0.97
