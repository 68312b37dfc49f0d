"""Which checkpoint a run goes on from: the newest that is whole, for every model that has one."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.checkpoint.errors import CheckpointError
from qarl_openrlhf.checkpoint.facts import difference

_STEP = re.compile(r"^(?:best_)?global_step(\d+)$")


@dataclass
class Choice:
    """``tag`` of the checkpoint to load, None to start anew; ``notes`` on checkpoints that were passed over."""

    tag: str | None
    notes: list[str] = field(default_factory=list)


def step_of(tag: str) -> int | None:
    """The step in a tag: global_step20, best_global_step20 -> 20; None for other names."""
    match = _STEP.match(tag)
    return int(match[1]) if match else None


def tags(directory: Path) -> list[str]:
    """Tags of a directory's checkpoints, newest first; of the same step, OpenRLHF's "best" copy last."""
    if not directory.is_dir():
        return []
    found = [path.name for path in directory.iterdir() if path.is_dir() and step_of(path.name) is not None]
    return sorted(found, key=lambda tag: (-step_of(tag), tag.startswith("best")))


def finish_partial(directory: Path) -> None:
    """Give a checkpoint its name whose writer was killed between its last file and its renaming.

    One that is written again has had its name taken away for a moment, and then this may be the only one that is left.
    """
    for partial in directory.glob(f"*{manifest.PARTIAL}"):
        final = partial.with_name(partial.name.removesuffix(manifest.PARTIAL))
        if step_of(final.name) is not None and not final.exists() and manifest.read(partial):
            with suppress(FileNotFoundError):  # its writer lives, and has done it
                os.replace(partial, final)


def choose(path: str | Path, models: list[str], *, facts: dict, own: dict | None = None, tag: str | None = None) -> Choice:
    """The newest checkpoint under ``path`` that is whole for each of ``models`` ("_actor", "_critic").

    Args:
        facts: what the run that wants to load it has for all of them, see ``facts.FACTS``.
        own: {model: more facts of this one}.
        tag: this one and no other.

    Raises:
        CheckpointError: there are checkpoints, but none is whole; ``tag`` is not there, or broken; the newest whole one was
            written with other ``facts``.
    """
    path = Path(path)
    for model in models:
        finish_partial(path / model)
    every = tags(path / models[0])
    if tag is not None:
        if tag not in every:
            raise CheckpointError(f"{path / models[0]} has no checkpoint {tag}: it has {', '.join(every) or 'none'}")
        every = [tag]
    notes = []
    for candidate in every:
        why = next((why for model in models if (why := _problem(path / model / candidate))), None)
        if why is None:
            for model in models:
                _check_facts(path / model / candidate, model.removeprefix("_"), facts | (own or {}).get(model, {}))
            return Choice(candidate, notes)
        notes.append(f"checkpoint {candidate} is not whole ({why})")
    if notes:
        raise CheckpointError(
            f"no checkpoint under {path} is whole: {'; '.join(notes)}. Remove them, or name another --ckpt.path, to start anew"
        )
    return Choice(None)


def _problem(directory: Path) -> str | None:
    if not directory.is_dir():
        return f"{directory} is missing"
    return manifest.problem(directory)


def _check_facts(directory: Path, role: str, facts: dict) -> None:
    if wrong := difference(manifest.read(directory), facts, role):
        raise CheckpointError(f"{directory} {wrong}")
