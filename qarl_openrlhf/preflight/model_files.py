"""Local model directories: the tokenizer loads, the weights are whole and have the shapes of config.json.

The reference model is the policy's directory; a critic and a reward model have their own.
"""

import json
import os

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.architecture import check_config, meta_model
from qarl_openrlhf.planning.positions import load_config
from qarl_openrlhf.planning.paths import looks_local
from qarl_openrlhf.preflight.safetensors_headers import tensor_shapes
from qarl_openrlhf.preflight.tokenizer_files import load_tokenizer

# Checkpoints of these carry the names of transformers' parameters; others may be renamed as they are loaded.
PLAIN_NAMES = ("llama", "mistral", "qwen2", "qwen3")
HEAD = "lm_head.weight"


def check_model(args) -> None:
    """The policy's. ConfigError naming the file and the tensor. A name on the hub is left to the hub."""
    name = args.actor.model_name_or_path
    if not _is_directory("actor.model_name_or_path", name):
        return
    owner = f"--actor.model_name_or_path {name}"
    config = load_config(args)
    check_config(config, name, args.vllm.tensor_parallel_size)
    _check_not_quantized(owner, config)
    shapes = tensor_shapes(owner, name)
    if shapes is not None:
        model = meta_model(config, name)
        _compare(owner, config, model, shapes)
        if os.path.isfile(os.path.join(name, "model.safetensors")) or os.path.isfile(os.path.join(name, "model.safetensors.index.json")):
            _check_tied(owner, name, model, shapes)
    _check_tokenizer(owner, name, config, args.data.apply_chat_template)


def check_critic_and_reward_model(args) -> None:
    """As `check_model`, of the models with a value head that this run loads: neither needs a tokenizer, or meets an engine."""
    policy, others = args.actor.model_name_or_path, [("critic", args.critic.model_name_or_path)]
    if not args.reward.remote_url:  # else no reward model is loaded
        others.append(("reward", args.reward.model_name_or_path))
    for role, name in others:
        flag = f"{role}.model_name_or_path"
        if not name or name == policy or not _is_directory(flag, name):
            continue
        config = load_config(args, role)
        check_config(config, name, role=role)
        _check_not_quantized(f"--{flag} {name}", config)
        shapes = tensor_shapes(f"--{flag} {name}", name)
        if shapes is not None and config.model_type in PLAIN_NAMES:
            _compare(f"--{flag} {name}", config, meta_model(config, name, role), {HEAD: _head(config)} | shapes)


def _head(config) -> tuple[int, int]:
    """The shape of the lm_head that a model with a value head does without."""
    return config.vocab_size, config.hidden_size


def _is_directory(flag: str, name: str) -> bool:
    """False for a name on the hub; ConfigError for a path that is no directory."""
    if not os.path.isdir(name) and (os.path.exists(name) or looks_local(name)):
        raise ConfigError(f"--{flag} {name} is not a directory: give a model's directory, or a name on the hub")
    return os.path.isdir(name)


def _check_not_quantized(owner: str, config) -> None:
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{owner} is quantized already (quantization_config in config.json): give the BF16 model that it was made from")


def _check_tied(owner: str, directory: str, model, found: dict[str, tuple[int, ...]]) -> None:
    """transformers ties an lm_head that equals the embedding, and leaves another one apart; the engine goes by config.json alone,
    and has no place for a second tensor."""
    for head, embedding in (model.all_tied_weights_keys or {}).items():
        if head in found and embedding in found and not _same(directory, head, embedding):
            raise ConfigError(
                f"{owner}: config.json ties the embeddings (tie_word_embeddings true), but the weights hold a {head} that is not "
                f"{embedding}: set tie_word_embeddings to false in config.json, or remove {head} from the weights if it is a leftover"
            )


def _same(directory: str, one: str, other: str) -> bool:
    """Whether two tensors of the weights are equal in BF16."""
    import torch
    from safetensors import safe_open

    files, index = {}, os.path.join(directory, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            files = json.load(file)["weight_map"]

    def read(key: str) -> torch.Tensor:
        with safe_open(os.path.join(directory, files.get(key, "model.safetensors")), framework="pt") as file:
            return file.get_tensor(key).to(torch.bfloat16)

    return torch.equal(read(one), read(other))


def _compare(owner: str, config, model, found: dict[str, tuple[int, ...]]) -> None:
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    for key in wanted:
        if key in found and found[key] != wanted[key]:
            raise ConfigError(
                f"{owner}: {key} is {list(found[key])} in the weights and {list(wanted[key])} by config.json: they belong to different models"
            )
    if config.model_type not in PLAIN_NAMES:
        return
    bare = {key.removeprefix("model.") for key in found}
    tied = {HEAD} if getattr(config, "tie_word_embeddings", False) else set()
    missing = [key for key in wanted if key.removeprefix("model.") not in bare and key not in tied]
    if missing:
        raise ConfigError(f"{owner}: {len(missing)} tensors are not in its weights, {missing[0]} first; they would start at random")


def _check_tokenizer(owner: str, name: str, config, chat: bool) -> None:
    tokenizer = load_tokenizer(owner, name, trust_remote_code=True)
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    rows = config.get_text_config().vocab_size
    if size > rows:
        raise ConfigError(f"{owner}: its tokenizer has {size} tokens, the model embeds {rows} (vocab_size): they belong to different models")
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"{owner}: its tokenizer has no chat template, which --data.apply_chat_template needs: drop the flag, or take an instruct model")
