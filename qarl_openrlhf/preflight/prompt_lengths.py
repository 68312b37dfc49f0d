"""Prompts as tokens. Of those that are too long for the run OpenRLHF drops the beginning, where the instruction is, and says so in a
worker's log; those that do not come back from their tokens as they were, our rewards cannot tell from the response.
"""

import os
from itertools import islice
from unicodedata import normalize

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.prompts import files_of
from qarl_openrlhf.preflight.rows import UNREAD, rows_of
from qarl_openrlhf.preflight.tokenizer_files import load_tokenizer
from qarl_openrlhf.rewards import answers

LOOKED_AT = 1000  # prompts of each file, about a second


def long_prompts(args) -> list[str]:
    """A note for each local file, or pattern, of ``--data.prompt_dataset`` whose first prompts are partly longer than the room they have.

    The tokens are those that the engine gets: template applied, nothing added. ConfigError if none of them fits, and for a prompt that
    a reward of ours would not know again in the decoded text. Names on the hub, and models on the hub, are not looked at.
    """
    model = args.actor.model_name_or_path
    if not os.path.isdir(model):
        return []
    response = args.rollout.max_new_tokens
    room = args.data.max_len - (1 if response is None else response)
    notes, tokenizer = [], None
    for name in args.data.prompt_dataset.split(","):
        path = name.split("@")[0].strip()
        if "://" in path or os.path.isdir(path) or not path.endswith((".json", ".jsonl", ".csv")):
            continue
        files = files_of("data.prompt_dataset", path)
        if tokenizer is None:
            tokenizer = load_tokenizer(f"--actor.model_name_or_path {model}", model, trust_remote_code=True)
        texts = _texts(args.data, path, files, tokenizer)
        tokens = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        if _reward_is_ours(args):
            for number, (text, ids) in enumerate(zip(texts, tokens, strict=True), 1):
                _check_known_again(f"--data.prompt_dataset {path}, prompt {number}", text, tokenizer.decode(ids, skip_special_tokens=False), model)
        lengths = [len(ids) for ids in tokens]
        if not (long := [length for length in lengths if length > room]):
            continue
        less = "" if response is None else f" less --rollout.max_new_tokens {response}"
        found = (
            f"{len(long):,} of the first {len(lengths):,} prompts of --data.prompt_dataset {path} are longer than {room:,} tokens "
            f"(--data.max_len {args.data.max_len}{less}), the longest {max(long):,}"
        )
        if len(long) == len(lengths):
            raise ConfigError(f"{found}: raise --data.max_len")
        notes.append(f"{found}: their beginning is cut off. Raise --data.max_len, or leave them out")
    return notes


def _reward_is_ours(args) -> bool:
    """A file of ``rewards/``, all of which look for the prompt in the decoded text."""
    entries = [] if args.train.agent_func_path else args.reward.remote_url or []
    return os.path.dirname(os.path.realpath(answers.__file__)) in [os.path.dirname(os.path.realpath(entry)) for entry in entries]


def _check_known_again(where: str, prompt: str, decoded: str, model: str) -> None:
    """ConfigError unless :func:`answers.response_of` finds the whole prompt in what its tokens decode to."""
    try:
        rest = answers.response_of(decoded, prompt)
    except ValueError:
        rest = None
    if rest != "":
        given, got = normalize("NFC", prompt), normalize("NFC", decoded)
        at = len(os.path.commonprefix([given, got]))
        raise ConfigError(
            f"{where}: the tokenizer of {model} does not give it back as it was (it makes {got[at : at + 40]!r} of {given[at : at + 40]!r}), "
            "so that the file of --reward.remote_url could not tell prompt and response apart: change these characters"
        )


def _texts(data, path: str, files: list[str], tokenizer) -> list[str]:
    """As OpenRLHF makes them, whose module for it takes seconds to import."""
    rows = (row[data.input_key] for file in files for _, row in rows_of(f"--data.prompt_dataset {path}", file) if row is not UNREAD)
    prompts = list(islice(rows, LOOKED_AT))
    if data.apply_chat_template:
        chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        try:
            return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        except Exception as error:  # whatever a template raises: roles that it does not take, fields that are not there
            raise ConfigError(f"--data.prompt_dataset {path}: the model's chat template does not take these prompts: {error}") from None
    return [data.input_template.format(prompt) for prompt in prompts] if data.input_template else prompts
