"""``--model.max_positions`` and ``--model.rope_theta``: a longer context than the checkpoint's config.json allows.

OpenRLHF and vLLM have no common flag for it: the learner takes everything from config.json, and vLLM refuses a
``max_model_len`` above that file's ``max_position_embeddings``. So the file itself is what changes: :func:`write_view` makes a
directory of links to the checkpoint's files with an edited config.json, and learner, reference, engines and every export of the
run read or inherit that one file.
"""

import json
import os
import uuid

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.paths import looks_local

FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]  # of a checkpoint on the hub


def overridden(args) -> bool:
    """Whether the flags change the model's positions."""
    return args.model.max_positions is not None or args.model.rope_theta is not None


def with_positions(config: dict, max_positions: int | None, rope_theta: float | None) -> dict:
    """A copy of a config.json's content with the two values in place; ConfigError where they would mean something else."""
    config = dict(config)
    if max_positions is not None:
        config["max_position_embeddings"] = max_positions
    if rope_theta is None:
        return config
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if "max_position_embeddings" not in config or kind != "default":
        found = f"rope type {kind!r}" if "max_position_embeddings" in config else "no max_position_embeddings"
        raise ConfigError(f"--model.rope_theta is for plain rotary positions, but the model's config.json has {found}: drop the flag")
    if config.get("rope_parameters"):
        config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": rope_theta}
    else:
        config["rope_theta"] = rope_theta
    return config


def load_config(args, role: str = "actor"):
    """The Hugging Face config of a role's ``--ROLE.model_name_or_path``, with the overrides where it is the policy's. ConfigError if there is none."""
    from transformers import AutoConfig

    name = getattr(args, role).model_name_or_path
    flag = f"--{role}.model_name_or_path {name}"
    if looks_local(name) and not os.path.isdir(name):
        raise ConfigError(f"{flag} is not a directory: give a model's directory, or a name on the hub")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: {error}") from None
    except Exception as error:  # transformers lets through whatever a broken config.json makes of its code
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{flag}: its config.json cannot be used ({reason})") from error
    if name != args.actor.model_name_or_path or not overridden(args):
        return config
    fields = with_positions(config.to_dict(), args.model.max_positions, args.model.rope_theta)
    return type(config).from_dict(fields)


def check_positions(args, config=None) -> None:
    """Prompt and response must fit the model's positions, and leave room for each other. ConfigError says what fits."""
    config = load_config(args) if config is None else config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and args.data.max_len > positions:
        raise ConfigError(
            f"--data.max_len {args.data.max_len} (prompt + response) does not fit the {positions} positions of "
            f"{args.actor.model_name_or_path}: use at most {positions}, or extend them with --model.max_positions "
            f"{args.data.max_len} and a larger --model.rope_theta"
        )
    response = args.rollout.max_new_tokens
    if response is not None and response >= args.data.max_len:
        raise ConfigError(
            f"--rollout.max_new_tokens {response} leaves no room for a prompt in --data.max_len {args.data.max_len}: raise "
            "--data.max_len to prompt + response"
        )


def write_view(model: str, directory: str, max_positions: int | None, rope_theta: float | None) -> str:
    """Make ``directory``: links to the files of ``model`` (a local directory, or a name on the hub, downloaded), with an edited
    config.json; returns its absolute path. A directory that holds just that is kept.

    Engines on other hosts read it, too: with several nodes, it and the Hugging Face cache have to lie on shared storage.
    """
    source = model
    if not os.path.isdir(model):
        from huggingface_hub import snapshot_download

        source = snapshot_download(model, allow_patterns=FILES)
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = with_positions(json.load(file), max_positions, rope_theta)
    links = {
        name: os.path.realpath(os.path.join(source, name)) for name in sorted(os.listdir(source)) if name != "config.json"
    }
    links = {name: path for name, path in links.items() if os.path.isfile(path)}
    directory = os.path.abspath(directory)
    if os.path.isdir(directory):
        if _holds(directory, config, links):
            return directory
        raise ConfigError(
            f"{directory} holds a view of another model or other positions: remove it, or name another --metrics.dir"
        )
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    made = os.path.join(os.path.dirname(directory), f".view-{uuid.uuid4().hex[:16]}")
    os.mkdir(made)  # and not mkdtemp, whose mode is its own: umask is to rule
    for name, path in links.items():
        os.symlink(path, os.path.join(made, name))
    with open(os.path.join(made, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    os.rename(made, directory)
    return directory


def _holds(directory: str, config: dict, links: dict[str, str]) -> bool:
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            same = json.load(file) == config
    except (OSError, ValueError):
        return False
    return same and links == {
        name: os.path.realpath(os.path.join(directory, name)) for name in os.listdir(directory) if name != "config.json"
    }


def apply(args) -> None:
    """Before anything starts: point the arguments at a view of the model where the flags change its positions."""
    if not overridden(args):
        return
    original = args.actor.model_name_or_path
    view = write_view(original, os.path.join(args.metrics.dir, "model_view"), args.model.max_positions, args.model.rope_theta)
    args.actor.model_name_or_path = view
    if args.critic.model_name_or_path == original:
        args.critic.model_name_or_path = view
