"""A reward that fails ends the run, with an error that says why.

OpenRLHF's single-turn executor logs whatever goes wrong in a reward function and goes on with a reward of None, which surfaces
later, somewhere else. Here a reward function that raises, hangs, or returns NaN or nothing is named at once.
"""

import asyncio
import math
import os
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from openrlhf.utils.agent import SingleTurnAgentExecutor

from qarl_openrlhf.rewards.process_end import tell_exits

_failure: ContextVar[list | None] = ContextVar("qarl_reward_failure", default=None)


class RewardError(RuntimeError):
    """A reward function or server that gave no usable reward. Names it, the prompt and what it did."""


class StrictSingleTurnExecutor(SingleTurnAgentExecutor):
    """``SingleTurnAgentExecutor`` with a time limit on each reward (``timeout_s``), whose failures are errors."""

    timeout_s = 300.0

    @classmethod
    def convert(cls, executor: Any, timeout_s: float) -> None:
        """Make an executor of OpenRLHF strict, in place; a user's own agent is left alone. ``os._exit`` leaves word."""
        tell_exits()
        if type(executor) is SingleTurnAgentExecutor:
            executor.__class__ = cls
            executor.timeout_s = timeout_s
            if getattr(executor, "reward_func", None) is not None:
                executor.reward_func = _guarded(executor.reward_func)

    async def execute(self, prompt, label, *args, **kwargs):
        failures: list = []
        _failure.set(failures)
        output = await super().execute(prompt, label, *args, **kwargs)
        if self.reward_endpoints:
            if failures:
                raise RewardError(self._message(prompt, failures[0])) from failures[0]
            try:
                # Plain numbers: OpenRLHF makes a tensor of each, of another shape for a list of one than for a number.
                output["reward"] = _finite(output["reward"], "rewards")
                output["scores"] = _finite(output["scores"], "scores")
                output["extra_logs"] = _logs(output["extra_logs"])
            except ValueError as error:
                raise RewardError(self._message(prompt, error)) from None
        return output

    async def _fetch_rewards_via_func(self, *args):
        return await self._noted(super()._fetch_rewards_via_func(*args))

    async def _fetch_rewards_via_http(self, *args):
        return await self._noted(super()._fetch_rewards_via_http(*args))

    async def _noted(self, call):
        try:
            answers = await asyncio.wait_for(call, self.timeout_s)
            for answer in answers:
                if not isinstance(answer, dict) or "rewards" not in answer:
                    raise TypeError(f"it returned {_shown(answer)}; return a dict, e.g. {{\"rewards\": [1.0]}}")
            return answers
        except TimeoutError:
            error = TimeoutError(f"no answer within {self.timeout_s:g} s (--reward.timeout_s)")
            _failure.get().append(error)
            raise error from None
        except Exception as error:
            _failure.get().append(error)
            raise

    def _message(self, prompt: str, error: Exception) -> str:
        where = _place(error, self.reward_endpoints)
        return f"reward {', '.join(self.reward_endpoints)}: {type(error).__name__}: {error} ({where}prompt that ends {prompt[-80:]!r})"


def _finite(value: Any, field: str) -> float:
    """A number, or a list, array or tensor of one, as a float; ValueError for anything else, NaN and infinity."""
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"it returned {field} {_short(value)}; a finite number is needed, or a list or tensor of one")
    return number


def _logs(values: Any) -> dict[str, float]:
    """``extra_logs``, each a float; ValueError where they are no dict of numbers."""
    numbers = {name: _number(value) for name, value in values.items()} if isinstance(values, dict) else {"": None}
    if None in numbers.values() or not all(isinstance(name, str) for name in numbers):
        raise ValueError(f"it returned extra_logs {_short(values)}; a dict of numbers by name is needed")
    return numbers


def _number(value: Any) -> float | None:
    try:
        values = torch.as_tensor(value, dtype=torch.float32).flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # what torch says of text, dicts, None, ragged lists, huge integers
        return None
    return values[0] if len(values) == 1 else None


def _short(value: Any) -> str:
    """``repr`` of what a reward function returned, in one line of bounded length."""
    return " ".join(repr(value).split())[:80]


def _place(error: BaseException, files: list[str]) -> str:
    """"line 12 in reward_func, ": the last line of the user's own file that the error came through; "" for another's."""
    own = {os.path.abspath(name) for name in files}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.abspath(frame.filename) in own]
    return f"line {lines[-1].lineno} in {lines[-1].name}, " if lines else ""


def _guarded(function: Callable) -> Callable:
    """``sys.exit`` in a reward function would end the event loop of the engine's actor without a word, and the run would wait."""

    @wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code!r})") from None

    return call


def _shown(answer: Any) -> str:
    """Kind and start of what a reward function returned."""
    if answer is None:
        return "nothing"
    kind = "dict without rewards" if isinstance(answer, dict) else type(answer).__name__
    return f"a {kind} {_short(answer)}"
