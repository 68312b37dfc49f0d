"""Model directories that a worker could not load are named before Ray starts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.architecture import meta_model
from qarl_openrlhf.planning.positions import load_config
from qarl_openrlhf.preflight.model_files import check_critic_and_reward_model, check_model
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", hidden=64)


@pytest.fixture
def model(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def arguments(model, *, tp=1, chat=False) -> N:
    return N(
        actor=N(model_name_or_path=str(model)), model=N(max_positions=None, rope_theta=None), vllm=N(tensor_parallel_size=tp),
        data=N(apply_chat_template=chat),
    )  # fmt: skip


def change(model: Path, **fields) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


def test_a_whole_model_is_taken(model):
    check_model(arguments(model, tp=2))
    check_model(arguments("owner/name"))


@pytest.mark.parametrize("family, options", [("llama", {"tied": True}), ("qwen3_moe", {})])
def test_tied_and_expert_weights_are_whole(tmp_path, family, options):
    check_model(arguments(save_tiny_model(tmp_path, family, hidden=64, **options)))


def cut(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def of_another_size(model: Path) -> None:
    from tests.tiny_models import make_model

    make_model("qwen2", hidden=128).save_pretrained(model)
    change(model, hidden_size=64, intermediate_size=128, head_dim="gone")


def deeper(model: Path) -> None:
    change(model, num_hidden_layers=3, layer_types="gone")


@pytest.mark.parametrize(
    "spoil, message",
    [
        (cut, "model.safetensors has .* bytes, its header says"),
        (lambda m: (m / "model.safetensors").write_bytes(b"x" * 40), "no safetensors file"),
        (lambda m: (m / "model.safetensors").write_bytes(b""), "no safetensors file"),
        (lambda m: (m / "model.safetensors").unlink(), "has no weights"),
        (lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}'), "model-1.safetensors cannot be read"),
        (lambda m: (m / "model.safetensors.index.json").write_text("{"), "index.json cannot be read"),
        (of_another_size, r"is \[.*\] in the weights and \[.*\] by config.json"),
        (deeper, "not in its weights, model.layers.2"),
        (lambda m: (m / "tokenizer.json").unlink(), r"has no tokenizer.json \(nor .*\): copy the tokenizer's files"),
        (lambda m: (m / "tokenizer.json").write_text("{"), r"has a broken tokenizer.json \(.*\): download it again"),
        (lambda m: (m / "config.json").unlink(), "--actor.model_name_or_path"),
        (lambda m: (m / "config.json").write_text("{"), "--actor.model_name_or_path"),
        (lambda m: (m / "config.json").write_text("[1]"), "--actor.model_name_or_path"),
        (lambda m: change(m, model_type="no_such_type"), "no_such_type"),
        (lambda m: change(m, num_key_value_heads=3), "4 attention heads and 3 key-value heads"),
        (lambda m: change(m, num_key_value_heads=0), "key-value heads"),
        (lambda m: change(m, num_key_value_heads=8), "key-value heads"),
        (lambda m: change(m, num_attention_heads=0), "num_attention_heads 0"),
        (lambda m: change(m, num_attention_heads=6, num_key_value_heads=2), "hidden_size 64 and 6 attention heads"),
        (lambda m: change(m, hidden_size=0), "hidden_size 0"),
        (lambda m: change(m, hidden_size="64"), "hidden_size"),
        (lambda m: change(m, num_hidden_layers=-1, layer_types="gone"), "num_hidden_layers -1|cannot be used"),
        (lambda m: change(m, vocab_size=0), "vocab_size 0"),
        (lambda m: change(m, quantization_config={"quant_method": "compressed-tensors"}), "quantized already"),
    ],
)
def test_directories_that_do_not_load(model, spoil, message):
    spoil(model)
    with pytest.raises(ConfigError, match=message) as refused:
        check_model(arguments(model))
    assert str(model) in str(refused.value)


def test_heads_must_divide_by_tp_and_templates_must_exist(model):
    with pytest.raises(ConfigError, match="--vllm.tensor_parallel_size 3 does not divide the 4 attention heads .* use 1, 2, 4"):
        check_model(arguments(model, tp=3))
    with pytest.raises(ConfigError, match="no chat template, which --data.apply_chat_template needs"):
        check_model(arguments(model, chat=True))


def test_a_model_that_generates_no_text_of_its_own(model):
    (model / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ConfigError, match="makes no causal language model"):
        meta_model(load_config(arguments(model)), str(model))


@pytest.mark.parametrize("name", ["/no/such/model", "./no_such", "runs/inputs/sums/model"])
def test_paths_that_are_not_there(name):
    with pytest.raises(ConfigError, match=f"{name} is not a directory"):
        check_model(arguments(name))


def with_head(model: Path, change) -> None:
    """Add an lm_head.weight made of the embedding."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = change(weights["model.embed_tokens.weight"]).clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_tied_model_with_an_lm_head_of_its_own(tmp_path, family):
    model = Path(save_tiny_model(tmp_path, family, hidden=64, tied=True))
    with_head(model, lambda embedding: embedding)  # which transformers ties
    check_model(arguments(model))
    with_head(model, lambda embedding: embedding * 2)  # which it doesn't
    from transformers import AutoModelForCausalLM

    assert "lm_head.weight" in dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    with pytest.raises(ConfigError, match="config.json ties the embeddings .* set tie_word_embeddings to false"):
        check_model(arguments(model))
    change(model, tie_word_embeddings=False)
    check_model(arguments(model))


def with_others(actor, *, critic=None, reward=None, remote=None) -> N:
    args = arguments(actor)
    args.critic, args.reward = N(model_name_or_path=critic), N(model_name_or_path=reward, remote_url=remote)
    return args


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_critic_and_reward_model_are_looked_at_as_the_policy_is(saved, model, role):
    (model / "tokenizer.json").unlink()  # neither worker loads it
    good = {"critic": str(model), "reward": str(model)}
    check_critic_and_reward_model(with_others(saved, **good))
    check_critic_and_reward_model(with_others(saved, critic=saved, reward="owner/name"))
    with pytest.raises(ConfigError, match=f"--{role}.model_name_or_path /nope is not a directory"):
        check_critic_and_reward_model(with_others(saved, **(good | {role: "/nope"})))
    check_critic_and_reward_model(with_others(saved, reward="/nope", remote=["reward.py"]))  # not loaded then
    spoilt = (
        (deeper, "not in its weights, model.layers.2"), (lambda m: change(m, num_hidden_layers=2, num_key_value_heads=3), "key-value heads"),
        (lambda m: change(m, num_key_value_heads=2), None), (cut, "model.safetensors has .* bytes"), (lambda m: (m / "config.json").unlink(), "config.json"),
    )  # fmt: skip
    for spoil, message in spoilt:
        spoil(model)
        if message:
            with pytest.raises(ConfigError, match=f"--{role}.model_name_or_path {model}.*{message}"):
                check_critic_and_reward_model(with_others(saved, **{role: str(model)}))


def test_a_value_model_has_no_lm_head(saved, model):
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights["score.weight"] = weights.pop("lm_head.weight")[:1].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    check_critic_and_reward_model(with_others(saved, critic=str(model), reward=str(model)))
