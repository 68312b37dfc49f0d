"""Options of the mathematics reward (see `rewards/math.py`): one dataclass, filled from environment variables or arguments.

A module of its own, because OpenRLHF executes a reward file without registering it as a module, and dataclasses need theirs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from qarl_openrlhf.rewards.pool import JudgePool, shared_pool


@dataclass(frozen=True)
class MathOptions:
    """See `rewards/math.py`. ValueError names the variable (or argument) and what it takes."""

    answer: str = "any"
    think: bool = False
    overlong: str = "judge"
    wrong: float = 0.0
    timeout: float = 5.0
    workers: int = max(1, min(8, len(os.sched_getaffinity(0)) // 2))

    def __post_init__(self):
        _one_of("answer", self.answer, ("any", "boxed"))
        _one_of("overlong", self.overlong, ("judge", "zero"))
        if self.timeout <= 0 or self.workers < 1:
            raise ValueError(f"QARL_MATH_TIMEOUT {self.timeout} and QARL_MATH_WORKERS {self.workers} must be positive")

    @classmethod
    def from_environment(cls, environment=os.environ, **given) -> "MathOptions":
        """The environment's options; `given` ones win."""
        read = {"think": _flag, "wrong": float, "timeout": float, "workers": int}
        for option in fields(cls):
            name = f"QARL_MATH_{option.name.upper()}"
            if option.name not in given and environment.get(name):
                try:
                    given[option.name] = read.get(option.name, str)(environment[name])
                except ValueError:
                    raise ValueError(f"{name}={environment[name]!r} is no {option.type}; the default is {option.default}") from None
        return cls(**given)

    def pool(self) -> JudgePool:
        return shared_pool(seconds=self.timeout, size=self.workers)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"QARL_MATH_{name.upper()} (or {name}=) is {value!r}; it takes {' or '.join(known)}")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"
