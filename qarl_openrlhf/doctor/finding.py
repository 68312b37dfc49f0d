"""One result of one check."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    WARN = "warn"  # training runs, but not as it was tested, or not for long
    FAIL = "FAIL"  # training would fail


@dataclass(frozen=True)
class Finding:
    """topic: a word; what: what was found, against what is needed; fix: the command or flag that mends it."""

    level: Level
    topic: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.level.value:<4}  {self.topic:<10}  {self.what}"
        return text + (f"\n      {'':<10}  fix: {self.fix}" if self.fix else "")


def ok(topic: str, what: str) -> Finding:
    return Finding(Level.OK, topic, what)


def warn(topic: str, what: str, fix: str) -> Finding:
    return Finding(Level.WARN, topic, what, fix)


def fail(topic: str, what: str, fix: str) -> Finding:
    return Finding(Level.FAIL, topic, what, fix)
