"""What is evaluated: the items of a task, and the settings a run of it has."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from qarl_openrlhf.data.math_rows import problem_and_label
from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.data.sources import CODE, EVAL, load_rows, place_of
from qarl_openrlhf.rewards.reasoning_gym import entry_of

# Samples an item where --k is not given: small sets need many for a steady average. Ours; the paper does not print its k.
DEFAULT_K = {"aime24": 32, "aime25": 32, "amc23": 32, "math500": 4, "minerva": 4, "olympiadbench": 4}


@dataclass(frozen=True)
class Item:
    """One problem. index: its place in the set, from 0."""

    task: str
    index: int
    problem: str
    label: str

    def prompt(self, template: str) -> str:
        return template.format(problem=self.problem)

    def seed(self, seed: int) -> int:
        """A seed of its own, whatever order or batch it is sampled in: a resumed run gives the same numbers."""
        return int.from_bytes(hashlib.sha256(f"{seed}/{self.task}/{self.index}".encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class Settings:
    """Everything that changes a score. max_tokens: of a response; weights: which files of a local model, "" for one on the hub."""

    model: str
    scheme: str
    engine: str
    temperature: float
    top_p: float
    max_tokens: int
    template: str
    chat: bool
    seed: int
    weights: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def load_items(argument: str, limit: int | None = None, input_key: str | None = None, label_key: str | None = None) -> list[Item]:
    """Items of 'NAME', 'FILE' or 'NAME=FILE'; a set with LiveCodeBench's columns gives `CodeItem`s. DataError names the flag,
    the file and the row: also for a benchmark's name before rows of the other kind, whose score would bear that name.

    input_key, label_key: of problem and label, where they are not the known ones; a set that is read by them is mathematics."""
    from qarl_openrlhf.evaluation.code_items import code_items, is_code

    name, rows = load_rows(argument, EVAL | CODE, "--tasks")
    if not rows:
        raise DataError(f"--tasks {argument}: {place_of(argument, EVAL | CODE)} is empty, and a task needs one row or more")
    place, code = place_of(argument, EVAL | CODE), is_code(rows) and input_key is None and label_key is None
    if code and name in EVAL:
        raise DataError(f"--tasks {argument}: {name} is a mathematics set, and {place} has LiveCodeBench's columns: write livecodebench={place}")
    if not code and name in CODE:
        there = ", ".join(map(str, rows[0]))
        raise DataError(f"--tasks {argument}: {place}, row 1 has no public_test_cases, as {name} has (its columns are {there}): write own={place}")
    if code:
        return code_items(name, rows[:limit], place)
    for flag, key in (("--input_key", input_key), ("--label_key", label_key)):
        if key is not None and key not in rows[0]:
            raise DataError(f"{flag} {key}: {place}, row 1 has no such column; its columns are {', '.join(map(str, rows[0]))}")
    pairs = [problem_and_label(row, f"{place}, row {number}", input_key, label_key) for number, row in enumerate(rows[:limit], 1)]
    return [Item(name, index, problem, label) for index, (problem, label) in enumerate(pairs)]


def kind_of(items: list[Item]) -> str:
    """Who judges a task: "code", "gym" (every label is one of `data.reasoning_gym`, as in the files of `data.small_qwen3`) or "mathematics"."""
    from qarl_openrlhf.evaluation.code_items import CodeItem

    if isinstance(items[0], CodeItem):
        return "code"
    return "gym" if all(entry_of(item.label) for item in items) else "mathematics"
