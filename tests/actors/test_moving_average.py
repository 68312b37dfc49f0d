"""--train.enable_ema: the average of a resumed run starts from what was resumed, and moves, under every ZeRO stage."""

import json
import os
import subprocess
import sys

import pytest

from qarl_openrlhf.preflight.resume import choose_checkpoint
from qarl_openrlhf.runtime import free_port
from tests.overlay import ROOT
from tests.tiny_models import save_tiny_model

from .conftest import learner_args


@pytest.mark.parametrize("stage, world", [(2, 1), (3, 2)])
def test_an_average_that_a_resume_switches_on_starts_from_the_resumed_weights(tmp_path, stage, world):
    model, directory = save_tiny_model(tmp_path / "model", "llama", hidden=128), tmp_path / "checkpoints"
    command = [sys.executable, "-m", "tests.actors.ema_worker", model, str(directory), str(stage)]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    logs = [open(tmp_path / f"{rank}.log", "w+") for rank in range(world)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=shared | {"RANK": str(rank)}, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        for rank, process in enumerate(ranks):
            assert process.wait(280) == 0, (tmp_path / f"{rank}.log").read_text()[-3000:]
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            log.close()
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
