"""What an export may put its directory in place of: nothing, an empty directory, or an earlier export.

A directory with the marker goes as a whole, with any file that was put beside the export later; only a directory within it keeps it.
Without the marker, one file that no export writes does.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from qarl_openrlhf.quant.errors import QuantError

MARKER = ".qarl-export"  # in every export since it exists; holds the scheme
FOLDERS = ("additional_chat_templates",)  # the one that a tokenizer writes
# Exports from before the marker: they hold nothing but these.
WRITTEN = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
)


def check_target(target: str | os.PathLike, sources: tuple[str, ...] = ()) -> Path:
    """The real path to write; QuantError where something other than an earlier export would be lost.

    sources: what the export reads; a hub name, which is no path here, cannot be lost.
    """
    path = Path(target).resolve()  # of a link to another disk, the directory there
    for source in sources:
        if os.path.exists(source) and (path == (real := Path(source).resolve()) or path in real.parents):
            what = "is the source itself" if path == real else f"contains the source {source}"
            raise QuantError(f"--out {target} {what}: name another directory")
    if path.exists() and not path.is_dir():
        raise QuantError(f"--out {target} is a file: name a directory")
    if path.is_dir() and (foreign := _foreign(path)):
        raise QuantError(
            f"--out {target} is no earlier export (it holds {foreign}) and is left as it is: name a new directory, or empty this one"
        )
    return path


def put_in_place(new: str | os.PathLike, target: Path) -> None:
    """Move directory ``new`` to ``target``; an older export there is removed only once the new one is in place."""
    check_target(target)  # again: writing took a while
    if target.exists():
        old = tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent)
        os.replace(target, os.path.join(old, "moved"))
        os.replace(new, target)
        shutil.rmtree(old)
    else:
        os.replace(new, target)


def _foreign(directory: Path) -> str | None:
    """A name in it that no export wrote; None if the directory may be replaced."""
    entries = sorted(directory.iterdir())
    if folders := [path.name for path in entries if path.is_dir() and path.name not in FOLDERS]:
        return f"the directory {folders[0]}"
    if not entries or (directory / MARKER).is_file():
        return None
    others = [path.name for path in entries if not path.is_dir() and not any(fnmatchcase(path.name, w) for w in WRITTEN)]
    if others:
        return others[0]
    # A model of someone else's has the same files; only ours is sure to be quantized in this format.
    return None if _quantized(directory / "config.json") else "a model without quantization"


def _quantized(config: Path) -> bool:
    try:
        return json.loads(config.read_text(encoding="utf-8"))["quantization_config"]["quant_method"] == "compressed-tensors"
    except (OSError, ValueError, KeyError, TypeError):
        return False
