"""Training problems that an evaluation set also has.

A training problem is one of them if its words (case, LaTeX spacing and punctuation apart) are the same, or if it contains at
least half of the 10-word runs of an evaluation problem that has 20 words or more: copies with another first sentence or
another question at the end. Problems that only share a formula are not caught, and not meant to be.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

RUN = 10
MIN_WORDS = 20
SHARE = 0.5

_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|text|mathrm|[,;:! ])")
_WORD = re.compile(r"[^\W_]+|[-+=<>^/*]")


def words(text: str) -> tuple[str, ...]:
    """What makes a problem itself: words, numbers and signs, in lower case."""
    text = _SPACING.sub(" ", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return tuple(_WORD.findall(text.casefold()))


def runs(problem: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {problem[i : i + RUN] for i in range(len(problem) - RUN + 1)}


class OverlapIndex:
    """Names the evaluation set that holds a problem."""

    def __init__(self, problems: Iterable[tuple[str, str]]):
        """problems: (set name, problem text)."""
        self.exact: dict[tuple[str, ...], str] = {}
        self.by_run: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self.long: list[tuple[str, int]] = []  # (set name, number of runs)
        for name, text in problems:
            problem = words(text)
            self.exact.setdefault(problem, name)
            if len(problem) >= MIN_WORDS:
                own = runs(problem)
                for run in own:
                    self.by_run[run].append(len(self.long))
                self.long.append((name, len(own)))

    def find(self, text: str) -> str | None:
        """The evaluation set with this problem, or None."""
        problem = words(text)
        if problem in self.exact:
            return self.exact[problem]
        shared = Counter(i for run in runs(problem) for i in self.by_run.get(run, ()))
        return next((self.long[i][0] for i, n in shared.items() if n >= SHARE * self.long[i][1]), None)
