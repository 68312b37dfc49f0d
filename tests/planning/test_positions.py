"""--model.max_positions and --model.rope_theta: one edited config.json for learner, engine and export."""

import json
import os
from types import SimpleNamespace as N

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.positions import apply, with_positions, write_view
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", hidden=64)


@pytest.fixture
def view(model, tmp_path):
    return write_view(model, str(tmp_path / "run" / "model_view"), 2048, 40000.0)


def test_learner_gets_new_frequencies_and_the_same_weights(model, view):
    before, after = (AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32) for d in (model, view))
    assert after.config.max_position_embeddings == 2048 and before.config.max_position_embeddings == 512
    size = 2 * len(after.model.rotary_emb.inv_freq)
    expected = 40000.0 ** -(torch.arange(0, size, 2).float() / size)
    torch.testing.assert_close(after.model.rotary_emb.inv_freq, expected)
    assert not torch.equal(before.model.rotary_emb.inv_freq, expected)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(view).eos_token == AutoTokenizer.from_pretrained(model).eos_token


def test_the_original_is_untouched_and_nothing_is_copied(model, view):
    assert AutoConfig.from_pretrained(model).max_position_embeddings == 512
    others = [name for name in os.listdir(view) if name != "config.json"]
    assert others and all(os.path.islink(os.path.join(view, name)) for name in others)


def test_export_inherits_the_positions(view, tmp_path):
    from qarl_openrlhf.export.write import export_checkpoint
    from qarl_openrlhf.quant.convert import convert_model
    from qarl_openrlhf.quant.scheme import QuantScheme

    scheme = QuantScheme.parse("w4a16:g64")
    network = AutoModelForCausalLM.from_pretrained(view, dtype=torch.bfloat16)
    convert_model(network, scheme)
    export_checkpoint(network, network.config, str(tmp_path / "export"), scheme)
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert config.max_position_embeddings == 2048 and config.rope_parameters["rope_theta"] == 40000.0


def test_engine_takes_the_longer_context(model, view):
    from vllm.config import ModelConfig

    assert ModelConfig(model=view, max_model_len=2048, dtype="bfloat16").max_model_len == 2048
    assert ModelConfig(model=view, dtype="bfloat16").hf_config.rope_parameters["rope_theta"] == 40000.0
    with pytest.raises(ValueError, match="max_model_len"):
        ModelConfig(model=model, max_model_len=2048, dtype="bfloat16")


def test_made_again_it_is_kept_and_another_is_refused(model, view):
    assert write_view(model, view, 2048, 40000.0) == view
    with pytest.raises(ConfigError, match="remove it"):
        write_view(model, view, 4096, 40000.0)


def test_published_form_of_config_json():
    published = {"max_position_embeddings": 4096, "rope_theta": 10000}
    assert with_positions(published, 18432, 40000.0) == {"max_position_embeddings": 18432, "rope_theta": 40000.0}
    assert published["rope_theta"] == 10000


@pytest.mark.parametrize("scaling", [{"rope_scaling": {"type": "yarn", "factor": 4}}, {"rope_parameters": {"rope_type": "llama3"}}])
def test_scaled_positions_are_refused(scaling):
    with pytest.raises(ConfigError, match="plain rotary"):
        with_positions({"max_position_embeddings": 4096, **scaling}, None, 40000.0)


def test_file_is_json_that_others_read(view):
    with open(os.path.join(view, "config.json"), encoding="utf-8") as file:
        assert json.load(file)["max_position_embeddings"] == 2048


def test_a_run_points_every_role_at_the_view(model, tmp_path):
    args = N(
        actor=N(model_name_or_path=model), critic=N(model_name_or_path=model), metrics=N(dir=str(tmp_path / "run")),
        model=N(max_positions=2048, rope_theta=None),
    )  # fmt: skip
    apply(args)
    assert args.actor.model_name_or_path == args.critic.model_name_or_path == str(tmp_path / "run" / "model_view")
    untouched = N(actor=N(model_name_or_path=model), model=N(max_positions=None, rope_theta=None))
    apply(untouched)
    assert untouched.actor.model_name_or_path == model
