"""--train.enable_ema: the average of a resumed run starts from what was resumed, and moves, under every ZeRO stage."""

import json

import pytest

from qarl_openrlhf.preflight.resume import choose_checkpoint
from tests.ranks import Ranks
from tests.tiny_models import save_tiny_model

from . import ema_worker
from .conftest import learner_args


@pytest.mark.parametrize("stage, world", [(2, 1), (3, 2)])
def test_an_average_that_a_resume_switches_on_starts_from_the_resumed_weights(tmp_path, stage, world):
    model, directory = save_tiny_model(tmp_path / "model", "llama", hidden=128), tmp_path / "checkpoints"
    Ranks(ema_worker.main, world, model, str(directory), stage).wait(280)
    for rank in range(world):
        found = json.loads((directory / f"rank{rank}.json").read_text())
        assert found == dict.fromkeys(("trained", "starts from the resumed weights", "follows", "is kept"), True), rank

    args = learner_args(
        model, ckpt__path=str(directory), ckpt__load_enable=True, train__enable_ema=True, ds__zero_stage=stage,
        actor__num_gpus_per_node=world, ref__num_gpus_per_node=world,
    )  # fmt: skip
    args.ckpt.load_tag = "global_step1"
    said = "--train.enable_ema: the checkpoint was written without; the moving average starts from its weights"
    assert said in choose_checkpoint(args)
    args.ckpt.load_tag = "global_step2"
    assert not any("moving average" in note for note in choose_checkpoint(args))
