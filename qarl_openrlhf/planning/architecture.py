"""From a config.json to the model it describes, without weights; ConfigError where it describes none."""

import torch

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.positions import load_config


def check_config(config, name: str, tp: int = 1, role: str = "actor") -> None:
    """ConfigError for sizes that make no model, or whose heads do not divide by the engine's tensor parallel size."""
    text = config.get_text_config()
    owner = f"--{role}.model_name_or_path {name}: config.json"
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        value = getattr(text, field, 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{owner} has {field} {value!r}: it must be a whole number of at least 1")
    heads = getattr(text, "num_attention_heads", 1)
    kv_heads = getattr(text, "num_key_value_heads", None)
    if kv_heads is not None and (not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads):
        raise ConfigError(f"{owner} has {heads} attention heads and {kv_heads} key-value heads: the second must divide the first")
    if not getattr(text, "head_dim", None) and getattr(text, "hidden_size", 0) % heads:
        raise ConfigError(f"{owner} has hidden_size {text.hidden_size} and {heads} attention heads: the second must divide the first")
    if heads % tp:
        works = ", ".join(str(size) for size in (1, 2, 4, 8, 16) if heads % size == 0)
        raise ConfigError(f"--vllm.tensor_parallel_size {tp} does not divide the {heads} attention heads of {name}: use {works}")


# Of vLLM 0.29's attention on a CPU; another size ends its process in the first batch.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_heads(args) -> None:
    """ConfigError for heads of a size that the engine on a CPU does not know."""
    if args.device != "cpu":
        return
    text = load_config(args).get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ConfigError(
            f"--actor.model_name_or_path {args.actor.model_name_or_path} has heads of size {size}: vLLM's attention on a CPU knows {sizes}; "
            "use another model, or a GPU"
        )


def meta_model(config, name: str, role: str = "actor") -> torch.nn.Module:
    """The model on the meta device: names and shapes."""
    from transformers import AutoModelForCausalLM

    check_config(config, name, role=role)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    except Exception as error:  # whatever a wrong value makes of the model's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"--{role}.model_name_or_path {name}: its config.json makes no causal language model ({reason})") from error
