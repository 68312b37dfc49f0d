"""A user's Python file (rewards, an agent) that fails while an engine loads it is named, by flag, file and line."""

import os
import traceback

# Where OpenRLHF loads one: the flag that names it, and the variable that holds it there.
_LOADERS = {
    "SingleTurnAgentExecutor.__init__": ("reward.remote_url", "remote_rm_url"),
    "_load_agent_executor": ("train.agent_func_path", "agent_func_path"),
}


class UserFileError(RuntimeError):
    """A file of the user's that cannot be loaded. Names the flag, the file, its line, and what it raised."""


def load_error(error: BaseException) -> UserFileError | None:
    """What to raise in the place of ``error`` if it comes from the loading of a user's file; None for any other.

    In one line, whatever the message is: the error travels as the last line of the traceback that Ray makes of an actor's start.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    loaders = [frame for frame, _ in frames if frame.f_code.co_qualname in _LOADERS]
    if not loaders:
        return None
    flag, variable = _LOADERS[loaders[0].f_code.co_qualname]
    given = loaders[0].f_locals[variable]
    return told(flag, given if isinstance(given, str) else given[0], error)


def told(flag: str, path: str, error: BaseException) -> UserFileError:
    """What to say of ``error``, which the loading of ``path`` raised."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if os.path.abspath(frame.f_code.co_filename) == os.path.abspath(path)]
    if isinstance(error, SystemExit):
        what = f"it called sys.exit({error.code!r})"
    else:
        what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return UserFileError(f"--{flag} {path}{f', line {lines[-1]}' if lines else ''}: {what} (while the file was loaded)")
