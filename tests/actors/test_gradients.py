"""The gradient of whole optimizer steps is that of the papers' formulas in float64 over all of their responses, however those lie:
on two ranks, in accumulated or packed micro-batches of a budget, in later epochs, where ratios have left their bands."""

import pytest
import torch
from torch.nn.functional import pad

from tests.objectives.objective_reference import SEQUENCE, reference
from tests.ranks import Ranks
from tests.tiny_models import save_tiny_model

from . import gradient_worker

WORLD = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict:
    """What gradient_worker wrote."""
    model, out = save_tiny_model(tmp_path_factory.mktemp("model"), "llama", hidden=128), tmp_path_factory.mktemp("gradients") / "all"
    Ranks(gradient_worker.main, WORLD, model, str(out)).wait()
    return torch.load(out)


@pytest.mark.parametrize("layout", gradient_worker.LAYOUTS)
@pytest.mark.parametrize("name", gradient_worker.SETTINGS)
def test_two_ranks_get_the_gradient_of_the_formula(trained, name, layout):
    _, updates = trained[name, layout]
    for update, micro_batches in updates.items():
        width = max(batch[0].shape[1] for batch in micro_batches)
        columns = zip(*micro_batches, strict=True)
        *inputs, advantages, mask, gradient = (torch.cat([pad(x, (0, width - x.shape[1])) for x in column]) for column in columns)
        assert len(mask) == 16
        advantages = (advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        _, expected = reference(name, *inputs, advantages, mask, **gradient_worker.SETTINGS[name][1])
        # DeepSpeed takes the mean over the ranks. What the mask leaves out may differ: it is multiplied by the mask on its way on.
        found = (gradient * mask).double() / WORLD
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()), msg=lambda m: f"update {update}: {m}")
        assert update or expected.any()


@pytest.mark.parametrize("layout", gradient_worker.LAYOUTS)
@pytest.mark.parametrize("name", gradient_worker.SETTINGS)
def test_the_clip_ratio_is_the_share_outside_the_band(trained, name, layout):
    """Of responses where the objective's units are responses."""
    metrics, _ = trained[name, layout]
    assert metrics["ppo_clip_ratio"] == pytest.approx(1 - metrics["objective/in_band_frac"], abs=1e-6)
    assert metrics["ppo_clip_ratio"] > 0 or name not in SEQUENCE
