"""Objectives by name. Adding one is a file ``NAME.py`` here with ``@objective(...) def NAME``, and its line below."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from .base import ObjectiveError
from .hyper import Flag
from .objective import Objective, Spec

OBJECTIVES = (
    "tbpo",
    "grpo_tis",
    "positive_grpo",
    "onpolicy_grpo",
    "dual_clip",
    "dapo",
    "cispo",
    "sapo",
    "gspo",
    "mis_gspo",
    "mis_grpo",
)
ALIASES = {"mis": "mis_gspo"}


def list_objectives() -> list[str]:
    """The names that ``build_objective`` takes, aliases left out."""
    return list(OBJECTIVES)


def build_objective(name: str, **hyperparameters) -> Objective:
    """The objective ``name`` (one of ``list_objectives()``, an alias, or ``path/to/file.py:function``).

    Raises ObjectiveError for an unknown name or hyperparameter (listing what exists) and for a value out of range.
    """
    return Objective(find_spec(name), **hyperparameters)


def objective_hyperparameters(name: str) -> dict[str, Flag]:
    """Hyperparameters of ``name`` as {name after ``--objective.``: (default, type, help)}.

    Two objectives may give one hyperparameter different defaults, so a flag's own default should be "not given".
    """
    return {key: Flag(h.default, h.type, h.help) for key, h in find_spec(name).hyperparameters.items()}


def find_spec(name: str) -> Spec:
    """The declaration behind a name: its level, mean, default weight and ``on_policy``."""
    if name.endswith(".py") or ".py:" in name:
        return _load_file(name)
    name = ALIASES.get(name, name)
    if name not in OBJECTIVES:
        raise ObjectiveError(
            f"unknown objective {name!r}; there are: {', '.join(OBJECTIVES)}"
            f" (also {', '.join(f'{a} for {n}' for a, n in ALIASES.items())}), or your own as path/to/file.py:function"
        )
    return getattr(importlib.import_module(f".{name}", __package__), name)


def _load_file(name: str) -> Spec:
    path, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    if not function:
        raise ObjectiveError(f"objective {name!r}: say which function, as {name}:function")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ObjectiveError(f"objective {name!r}: there is no file {file.resolve()}")
    module_spec = importlib.util.spec_from_file_location(f"qarl_user_objective_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code; sys.exit() in it would end the run without a word
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ObjectiveError(f"objective {name!r}: {file}{where} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if isinstance(found, Spec):
        return found
    declared = [key for key, value in vars(module).items() if isinstance(value, Spec)]
    raise ObjectiveError(
        f"objective {name!r}: {function} is {'not in that file' if found is None else 'not declared as an objective'};"
        " put @objective(level=..., mean=..., is_weight=...) of qarl_openrlhf.objectives above it"
        f" (declared there: {', '.join(declared) or 'none'})"
    )
