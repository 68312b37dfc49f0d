"""A model's tokenizer, or one line on why there is none: transformers tells of packages to install where a file is missing, and of a
column of JSON, without the file's name, where one is broken."""

from __future__ import annotations

import json
from pathlib import Path

from qarl_openrlhf.config import ConfigError

# One of these holds the vocabulary.
VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "spiece.model", "*.bpe.model")
JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
COPY = "copy the tokenizer's files from the model it came from"


def load_tokenizer(owner: str, name: str, *, trust_remote_code: bool = False):
    """ConfigError in one line that begins with `owner` (flag and value, or what the user called the model)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        pieces = tokenizer("1 + 1", add_special_tokens=False)["input_ids"]  # without its files it has special tokens alone
    except Exception as error:  # the loader lets through whatever a broken file makes of it
        text = str(error).strip().splitlines()
        what, fix = problem(name) or (f"has a tokenizer that does not load ({type(error).__name__}{': ' + text[0] if text else ''})", COPY)
        raise ConfigError(f"{owner} {what}: {fix}") from None
    if not pieces:
        what, fix = problem(name) or ("has a tokenizer without a vocabulary", COPY)
        raise ConfigError(f"{owner} {what}: {fix}")
    return tokenizer


def endless(args) -> list[str]:
    """A note where no token ends a response: neither the tokenizer nor config.json nor generation_config.json names one."""
    model = args.actor.model_name_or_path
    if not Path(model).is_dir() or args.rollout.stop:
        return []
    tokenizer = load_tokenizer(f"--actor.model_name_or_path {model}", model, trust_remote_code=True)
    configured = [_content(Path(model, name)).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    if tokenizer.eos_token_id is not None or any(found not in (None, []) for found in configured):
        return []
    return [
        f"--actor.model_name_or_path {model} has no end-of-sequence token, so that no response ends by itself: each is as long as "
        "--rollout.max_new_tokens or --data.max_len lets it be. Name one in its tokenizer_config.json (eos_token), or use --rollout.stop"
    ]


def _content(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def problem(name: str) -> tuple[str, str] | None:
    """(what, fix) of a directory whose tokenizer did not load; None of one whose files look whole, and of a name on the hub.

    Ask it after a failure only: a tokenizer of the model's own code may have files of any name.
    """
    directory = Path(name)
    if not directory.is_dir():
        return None
    if not any(path.is_file() for pattern in VOCABULARY for path in directory.glob(pattern)):
        return f"has no {VOCABULARY[0]} (nor {', '.join(VOCABULARY[1:])})", COPY
    for file in JSON_FILES:
        if (directory / file).is_file() and (why := _broken(directory / file)):
            return f"has a broken {file} ({why})", "download it again"
    return None


def _broken(path: Path) -> str | None:
    try:
        if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            return "no JSON object"
        if path.name == "tokenizer.json":
            from tokenizers import Tokenizer

            Tokenizer.from_file(str(path))
    except OSError as error:
        return error.strerror or "cannot be read"
    except Exception as error:  # tokenizers has no class of its own
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
