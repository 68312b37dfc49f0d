"""A local model directory: the tokenizer loads, the weights are whole and have the shapes of config.json."""

import os

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.architecture import check_config, meta_model
from qarl_openrlhf.planning.positions import load_config
from qarl_openrlhf.planning.paths import looks_local
from qarl_openrlhf.preflight.safetensors_headers import tensor_shapes

# Checkpoints of these carry the names of transformers' parameters; others may be renamed as they are loaded.
PLAIN_NAMES = ("llama", "mistral", "qwen2", "qwen3")


def check_model(args) -> None:
    """ConfigError naming the file and the tensor. A name on the hub is left to the hub."""
    name = args.actor.model_name_or_path
    if not os.path.isdir(name):
        if os.path.exists(name) or looks_local(name):
            raise ConfigError(f"--actor.model_name_or_path {name} is not a directory: give a model's directory, or a name on the hub")
        return
    owner = f"--actor.model_name_or_path {name}"
    config = load_config(args)
    check_config(config, name, args.vllm.tensor_parallel_size)
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{owner} is quantized already (quantization_config in config.json): give the BF16 model that it was made from")
    shapes = tensor_shapes(owner, name)
    if shapes is not None:
        _compare(owner, config, meta_model(config, name), shapes)
    _check_tokenizer(owner, name, config, args.data.apply_chat_template)


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
    tied = {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()
    missing = [key for key in wanted if key.removeprefix("model.") not in bare and key not in tied]
    if missing:
        raise ConfigError(f"{owner}: {len(missing)} tensors are not in its weights, {missing[0]} first; they would start at random")


def _check_tokenizer(owner: str, name: str, config, chat: bool) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
        pieces = tokenizer("1 + 1", add_special_tokens=False)["input_ids"]  # without its files it has special tokens alone
        size = max(tokenizer.get_vocab().values(), default=-1) + 1
    except Exception as error:  # the loader lets through whatever a broken file makes of it
        raise ConfigError(f"{owner}: its tokenizer does not load: {type(error).__name__}: {str(error)[:300]}") from None
    if not pieces:
        raise ConfigError(f"{owner}: its tokenizer has no vocabulary: copy tokenizer.json and tokenizer_config.json of the model there")
    rows = config.get_text_config().vocab_size
    if size > rows:
        raise ConfigError(f"{owner}: its tokenizer has {size} tokens, the model embeds {rows} (vocab_size): they belong to different models")
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"{owner}: its tokenizer has no chat template, which --data.apply_chat_template needs: drop the flag, or take an instruct model")
