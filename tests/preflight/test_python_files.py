"""Reward and agent files that OpenRLHF could not call are named before Ray starts."""

from pathlib import Path
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.python_files import check_agent, check_reward


def arguments(*rewards, agent=None, model=None) -> N:
    return N(train=N(agent_func_path=agent), reward=N(remote_url=[str(r) for r in rewards] or None, model_name_or_path=model))


@pytest.mark.parametrize(
    "text, message",
    [
        ("def reward_func(:\n", "line 1 does not compile: SyntaxError"),
        ("def reward_func(q, p, l):\n    pass\nreturn 3\n", "does not compile"),
        ("\0", "does not compile"),
        ("x = 1\n", "defines no reward_func"),
        ("import sys; sys.exit(3)\n", "defines no reward_func"),
        ("class A:\n    def reward_func(self, q, p, l): pass\n", "defines no reward_func"),
        ("reward_func = 3\n", "cannot be called"),
        ("def reward_func(q):\n    return 1\n", "is called with 3 arguments"),
        ("def reward_func(a, b, c, d):\n    return 1\n", "is called with 3 arguments"),
        ("import no_such_module_xyz\ndef reward_func(q, p, l): pass\n", "line 1 imports no_such_module_xyz, which is not installed"),
        ("from . import x\ndef reward_func(q, p, l): pass\n", "relative import"),
    ],
)
def test_reward_files_that_cannot_work(tmp_path, text, message):
    path = tmp_path / "reward.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--reward.remote_url .*{message}"):
        check_reward(arguments(path))


@pytest.mark.parametrize(
    "text",
    [
        "def reward_func(queries, prompts, labels, **kwargs):\n    return 1\n",
        "def reward_func(*args):\n    return 1\n",
        "from qarl_openrlhf.rewards.math import reward_func\n",
        "from qarl_openrlhf.rewards.math import *\n",
        "import functools\nreward_func = functools.partial(print)\n",
        "try:\n    import no_such_module_xyz\nexcept ImportError:\n    no_such_module_xyz = None\nif True:\n    reward_func = lambda q, p, l: 1\n",
        "class Reward:\n    def __call__(self, q, p, l): pass\nreward_func = Reward()\n",
    ],
)
def test_reward_files_that_work(tmp_path, text):
    path = tmp_path / "reward.py"
    path.write_text(text)
    check_reward(arguments(path))


def test_options_of_our_own_reward_are_read(monkeypatch, tmp_path):
    from qarl_openrlhf.rewards import math_options

    ours = Path(math_options.__file__).with_name("math.py")
    check_reward(arguments(ours))
    monkeypatch.setenv("QARL_MATH_ANSWER", "box")
    with pytest.raises(ConfigError, match="QARL_MATH_ANSWER .* is 'box'; it takes any or boxed"):
        check_reward(arguments(ours))
    other = tmp_path / "math.py"
    other.write_text("def reward_func(queries, prompts, labels): return {}")
    check_reward(arguments(other))


@pytest.mark.parametrize(
    "rewards, message",
    [(["/no/such.py"], "does not exist"), (["foobar"], "a Python file with reward_func, or a URL"), (["/x/text.foo"], "a URL"), (["http://a", "b.py"], "stands alone")],
)
def test_names_that_are_no_reward(rewards, message):
    with pytest.raises(ConfigError, match=message):
        check_reward(arguments(*rewards))


def test_urls_agents_and_reward_models():
    check_reward(arguments("http://host/score", "https://host/score"))
    check_reward(arguments("agent", agent="agent.py"))
    check_reward(arguments(model="owner/name"))
    with pytest.raises(ConfigError, match="--reward.model_name_or_path /no/such"):
        check_reward(arguments(model="/no/such"))


def test_agents(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("class AgentExecutor: pass\n")
    check_agent(arguments(agent=str(path)))
    path.write_text("class Agent: pass\n")
    for wrong, message in ((path, "defines no AgentExecutor"), ("/no/such.py", "does not exist"), ("agent.txt", "a class AgentExecutor")):
        with pytest.raises(ConfigError, match=message):
            check_agent(arguments(agent=str(wrong)))
