"""Hyperparameters, declared once: in the signature of the function that uses them.

    def tbpo(units, *, neg_seq_clip_ratio_low: Annotated[float, Param("help", at_least=0, below=1)] = 3e-4): ...
"""

from __future__ import annotations

import inspect
import math
import typing
from dataclasses import dataclass

from .base import ObjectiveError


@dataclass(frozen=True)
class Param:
    """Help text and range of a hyperparameter; goes into ``Annotated``."""

    help: str = ""
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        limits = [("at least", self.at_least), ("above", self.above), ("below", self.below)]
        parts = [f"{word} {limit:g}" for word, limit in limits if limit is not None]
        return "one of " + ", ".join(self.choices) if self.choices else " and ".join(parts)

    def allows(self, value) -> bool:
        return not (
            (self.choices and value not in self.choices)
            or (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


@dataclass(frozen=True)
class Hyperparameter:
    """What a signature says about one hyperparameter; ``help`` ends with the range."""

    default: object
    type: type
    help: str
    param: Param


class Flag(typing.NamedTuple):
    """What the command line needs to know of a hyperparameter."""

    default: object
    type: type
    help: str


def hyperparameters_of(function) -> dict[str, Hyperparameter]:
    """The keyword-only arguments of ``function``. Each needs a type (float, int, bool or str) and a default."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a name in a hint that does not exist
        raise ObjectiveError(f"{function.__name__}: its type hints cannot be read: {type(error).__name__}: {error}") from error
    found = {}
    for position, argument in enumerate(inspect.signature(function).parameters.values()):
        if position and argument.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            raise ObjectiveError(
                f"{function.__name__}: {argument.name!r} would never be set: hyperparameters are keyword-only, so put a `*` after "
                "the first argument"
            )
        if argument.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint = hints.get(argument.name)
        param = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Param)), Param())
        kind = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        if kind not in (float, int, bool, str) or argument.default is argument.empty:
            raise ObjectiveError(
                f"{function.__name__}: hyperparameter {argument.name!r} needs a default and a type of float, int, bool"
                f" or str, e.g. `{argument.name}: float = 0.2`"
            )
        limits = param.describe()
        help = f"{param.help} ({limits})" if limits else param.help
        found[argument.name] = Hyperparameter(argument.default, kind, help, param)
    return found


def check_value(owner: str, name: str, value, known: Hyperparameter):
    """``value`` in its declared type, or ObjectiveError. An int passes for a float; nothing else is converted."""
    if known.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not known.type:
        raise ObjectiveError(f"{owner}: {name}={value!r} must be a {known.type.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ObjectiveError(f"{owner}: {name}={value!r} must be finite")
    if not known.param.allows(value):
        raise ObjectiveError(f"{owner}: {name}={value!r} must be {known.param.describe()}")
    return value
