"""A reward file or an agent that fails while an engine loads it ends the run in one line; it is never tried again."""

import asyncio

import pytest
import ray
from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
from openrlhf.utils.agent import SingleTurnAgentExecutor

from qarl_openrlhf.cli.own_errors import own_message
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.engine import start_error
from qarl_openrlhf.engine.start_error import started
from qarl_openrlhf.engine.user_file import UserFileError
from qarl_openrlhf.preflight.python_files import check_agent, check_reward
from tests.preflight.test_python_files import arguments

REWARD = "\ndef reward_func(queries, prompts, labels):\n    return {'rewards': 1.0}\n"
AGENT = "from openrlhf.utils.agent import AgentExecutorBase\n\nclass AgentExecutor(AgentExecutorBase):\n"
LOADS = {
    "--reward.remote_url": lambda path: SingleTurnAgentExecutor([path]),
    "--train.agent_func_path": _load_agent_executor,
}
BODIES = {  # source, line, what is told
    "raises": ("import os\nraise RuntimeError('boom at import')" + REWARD, 2, "RuntimeError: boom at import"),
    "file": ("GOLD = 1\n\nGOLD = open('/no/such.json')" + REWARD, 3, "FileNotFoundError: [Errno 2] No such file or directory: '/no/such.json'"),
    "below": ("import json\ndef read():\n    return json.loads('{')\nread()" + REWARD, 3, "JSONDecodeError: Expecting property name"),
    "own function": ("def read():\n    assert False\n\nread()" + REWARD, 2, "AssertionError (while"),
    "name": ("from os import no_such_name" + REWARD, 1, "ImportError: cannot import name 'no_such_name'"),
    "several lines": ("raise ValueError('one\\n  two\\n\\nthree')" + REWARD, 1, "ValueError: one two three (while"),
    "exit": ("import sys\nsys.exit(3)" + REWARD, 2, "it called sys.exit(3)"),
    "port": ("raise OSError('Address already in use')" + REWARD, 1, "OSError: Address already in use"),
    "port of a library": ("raise RuntimeError('[Errno 98] Address already in use')" + REWARD, 1, "RuntimeError: [Errno 98]"),
    "the name": (REWARD + "del reward_func", None, "AttributeError: "),
}
AGENTS = {
    "start": (AGENT + "    def __init__(self):\n        self.gold = {}['gold']\n    def execute(self): ...\n", 5, "KeyError: 'gold'"),
    "base": ("class AgentExecutor:\n    pass\n", None, "AssertionError: AgentExecutor must inherit from AgentExecutorBase"),
    "abstract": (AGENT + "    pass\n", None, "TypeError: Can't instantiate abstract class AgentExecutor"),
}
CASES = [("--reward.remote_url", *case) for case in BODIES.values()]
CASES += [("--train.agent_func_path", *case) for name, case in [*BODIES.items(), *AGENTS.items()] if name != "the name"]


@pytest.mark.parametrize("flag, source, line, words", CASES)
def test_it_is_told_with_flag_file_and_line_and_not_tried_again(tmp_path, monkeypatch, flag, source, line, words):
    monkeypatch.setattr(start_error, "own_logs", lambda: [None, None])
    monkeypatch.chdir(tmp_path)  # a relative path is told as it was given
    (tmp_path / "boom.py").write_text(source + ("\nclass AgentExecutor: ...\n" if "AgentExecutor" not in source else ""))
    calls = []

    async def start():
        calls.append(1)
        LOADS[flag]("boom.py")

    with pytest.raises(UserFileError) as raised:
        asyncio.run(started(start))
    message = str(raised.value)
    assert message.startswith(f"{flag} boom.py{f', line {line}' if line else ''}: ") and words in message
    assert "\n" not in message and len(calls) == 1
    if source in (case[0] for case in BODIES.values()):  # an agent that loads is made by engines alone
        with pytest.raises(ConfigError) as early:
            (check_agent if "agent" in flag else check_reward)(arguments("boom.py", agent="boom.py" if "agent" in flag else None))
        assert str(early.value) == message  # of the preflight, word for word


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), RuntimeError("no room")])
def test_an_error_of_the_engine_itself_stays_what_it_is(monkeypatch, tmp_path, error):
    monkeypatch.setattr(start_error, "own_logs", lambda: [None, None])
    (tmp_path / "good.py").write_text(REWARD)

    async def start():
        SingleTurnAgentExecutor([str(tmp_path / "good.py")])
        raise error

    with pytest.raises(type(error)) as raised:
        asyncio.run(started(start))
    assert raised.value is error


class Engine:
    """Starts as the engines do: in an actor's own start."""

    async def __init__(self, path: str):
        async def start():
            SingleTurnAgentExecutor([path])

        await started(start)

    async def call(self):
        pass


@pytest.mark.parametrize("case", ["raises", "several lines", "exit"])  # what Ray might change: an exception, its lines, and no exception
def test_the_driver_says_it_in_one_line(small_ray, tmp_path, case):
    source, line, words = BODIES[case]
    path = tmp_path / "boom.py"
    path.write_text(source)
    engine = ray.remote(num_cpus=0)(Engine).remote(str(path))
    with pytest.raises(ray.exceptions.RayError) as raised:
        ray.get(engine.call.remote(), timeout=100)
    message = own_message(raised.value)
    assert message and message.startswith(f"--reward.remote_url {path}") and words in message and "\n" not in message
