"""Answers in responses and their verdicts: mathematics by the reward's judges, reasoning-gym's tasks by their scorers, programs by running
their tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from qarl_openrlhf.evaluation import sandbox
from qarl_openrlhf.evaluation.code_items import CodeItem, find_program, same_output, same_value
from qarl_openrlhf.evaluation.items import Item
from qarl_openrlhf.rewards import reasoning_gym
from qarl_openrlhf.rewards.answers import find_answer
from qarl_openrlhf.rewards.pool import JudgePool


class MathGrader:
    """The reward for mathematics: an evaluation's verdicts are those that training rewards."""

    headline = "avg"

    def __init__(self, judges: JudgePool):
        self.judges = judges

    def answer(self, response: str) -> str | None:
        return find_answer(response)

    def verdicts(self, answers: list[str | None], items: list[Item]) -> list[tuple[bool, str]]:
        """(right, "ok" or why there is no verdict) of each answer."""
        return self.judges.judge_all(answers, [item.label for item in items])


class GymGrader:
    """The reward for prompt sets of `data.reasoning_gym` and `data.small_qwen3`: the task's own scorer, full marks only."""

    headline = "avg"

    def answer(self, response: str) -> str | None:
        return reasoning_gym.answer_of(response) or None

    def verdicts(self, answers: list[str | None], items: list[Item]) -> list[tuple[bool, str]]:
        """See `MathGrader.verdicts`."""
        marks = [reasoning_gym.mark(answer, item.label) for answer, item in zip(answers, items, strict=True)]
        return [(mark >= 1.0, "no answer" if answer is None else "ok") for answer, mark in zip(answers, marks, strict=True)]


class CodeGrader:
    """Runs every program on its item's tests until one fails, `workers` programs at a time."""

    headline = "pass"

    def __init__(self, workers: int, limits: sandbox.Limits = sandbox.Limits()):
        self.workers, self.limits = workers, limits

    def answer(self, response: str) -> str | None:
        return find_program(response)

    def verdicts(self, answers: list[str | None], items: list[CodeItem]) -> list[tuple[bool, str]]:
        """(right, "ok", or what happened at which test) of each program. DataError where the sandbox does not close."""
        # An item's programs come one after another, and its tests may take hundreds of megabytes: only the last few are kept.
        tests_of = lru_cache(maxsize=self.workers)(CodeItem.read_tests)
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(lambda program, item: self._verdict(program, item, tests_of), answers, items))

    def _verdict(self, program: str | None, item: CodeItem, tests_of: Callable[[CodeItem], list]) -> tuple[bool, str]:
        if program is None:
            return False, "no answer"
        tests = tests_of(item)
        for number, test in enumerate(tests, 1):
            if item.function:
                outcome = sandbox.run(program, function=item.function, arguments=test.arguments(), limits=self.limits)
            else:
                outcome = sandbox.run(program, test.input, limits=self.limits)
            if outcome.status != "ok":
                detail = f" ({outcome.detail})" if outcome.status == "error" and outcome.detail else ""
                return False, f"{outcome.status} at test {number} of {len(tests)}{detail}"
            written = outcome.stdout.decode(errors="replace")
            if not (same_value if item.function else same_output)(written, test.output):
                return False, f"wrong at test {number} of {len(tests)}"
        return True, "ok"
