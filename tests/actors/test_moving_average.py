"""--train.enable_ema: the average follows, whatever the size of a step, and a resumed run goes on with it, under every ZeRO stage."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qarl_openrlhf.preflight.resume import choose_checkpoint
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from tests.ranks import Ranks
from tests.tiny_models import save_tiny_model

from . import ema_worker
from .conftest import learner_args


@pytest.mark.parametrize("stage, world", [(1, 2), (2, 1), (3, 2)])
def test_the_average_follows_is_kept_and_is_what_is_saved(tmp_path, stage, world):
    model, directory = save_tiny_model(tmp_path / "model", "llama", hidden=128), tmp_path / "checkpoints"
    Ranks(ema_worker.main, world, model, str(directory), stage).wait(280)
    for rank in range(world):
        found = json.loads((directory / f"rank{rank}.json").read_text())
        assert len(found) == 10 and not [what for what, true in found.items() if not true], rank
    quantized_as_saved(directory / "saved", directory / "rounded.pt", stage)

    args = learner_args(
        model, ckpt__path=str(directory), ckpt__load_enable=True, train__enable_ema=True, ds__zero_stage=stage,
        actor__num_gpus_per_node=world, ref__num_gpus_per_node=world,
    )  # fmt: skip
    args.ckpt.load_tag = "global_step1"
    said = "--train.enable_ema: the checkpoint was written without; the moving average starts from its weights"
    assert said in choose_checkpoint(args)
    args.ckpt.load_tag = "global_step2"
    assert not any("moving average" in note for note in choose_checkpoint(args))


def quantized_as_saved(directory, rounded, stage) -> None:
    """Both are the average: the BF16 model, and the export in it, which is what quantizing that model gives."""
    scheme = QuantScheme.parse("w4a16:g32")
    saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    if stage != 3:  # else each process has shards
        for parameter, average in zip(saved.parameters(), torch.load(rounded), strict=True):
            assert torch.equal(parameter.float(), average)
    convert_model(saved, scheme)
    expected, found = dict(published_tensors(saved, scheme)), load_file(directory / "quantized-w4a16-g32" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.detach()), name
