"""A reward file is loaded before anything starts, in a process of its own: what it raises is told, and nothing of it stays."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight import loading, preflight, python_files

from .test_python_files import arguments

REWARD = "\ndef reward_func(queries, prompts, labels):\n    return {'rewards': 1.0}\n"


@pytest.fixture
def check(tmp_path):
    """check(source): the file's preflight."""

    def of(source: str) -> None:
        (tmp_path / "own.py").write_text(source + REWARD)
        python_files.check_reward(arguments(tmp_path / "own.py"))

    return of


REFUSED = {  # the messages of errors are compared with the engines' in tests/engine/test_user_file.py
    "raises": ("def read():\n    return open('/no/such.json')\nread()", ", line 2: FileNotFoundError: .*'/no/such.json'"),
    "ends the process": ("import os\nos._exit(3)", ": it ended its process with exit code 3"),
    "ends it quietly": ("import os\nos._exit(0)", ": it ended its process with exit code 0"),
    "crashes": ("import ctypes\nctypes.string_at(0)", ": it ended its process with SIGSEGV"),
    "a base exception": ("raise KeyboardInterrupt", ", line 1: KeyboardInterrupt"),
    "an error after output": ("print('x' * 2**20, flush=True)\n1 / 0", ", line 2: ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_end_the_run_when_engines_load_it(tmp_path, check, capfd, case):
    source, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"^--reward.remote_url {tmp_path}/own.py{message} \(while the file was loaded\)$"):
        check(source)
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


LOADS = {
    "in a running loop": "import asyncio\nLOCK = asyncio.get_running_loop().create_future()",
    "a thread that stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "what it does at its end": "import atexit, time\natexit.register(time.sleep, 1000)",
    "killed by somebody": "import os\nos.kill(os.getpid(), 9)",
    "Ray": "import ray\nray.get_actor('judge')",
    "a GPU": "raise RuntimeError('No CUDA GPUs are available')",
    "a variable of a worker": "import os\nos.environ['CUDA_VISIBLE_DEVICES_OF_RAY']",
    "arguments": "import argparse\nargparse.ArgumentParser().parse_args()",
    "options from the environment": "import os\nassert os.environ['QARL_TEST_OPTION'] == '1'",
}


@pytest.mark.parametrize("case", LOADS)
def test_what_engines_can_load_or_cannot_be_told_here_is_not_refused(check, monkeypatch, case):
    monkeypatch.setattr(loading, "LEAVE_S", 0.5)
    monkeypatch.setenv("QARL_TEST_OPTION", "1")
    check(LOADS[case])


def test_a_file_that_merely_takes_long_is_left_to_the_engines(check, monkeypatch, capsys):
    monkeypatch.setattr(loading, "LIMIT_S", 0.5)
    began = time.monotonic()
    check("import time\ntime.sleep(1000)\nraise ValueError('never')")
    assert time.monotonic() - began < 30
    assert "takes more than 0.5 s to load, so whether it does is left to the engines" in capsys.readouterr().out


@pytest.mark.parametrize("last", ["", "raise ValueError('no')", "time.sleep(1000)"])
def test_no_process_of_it_stays(tmp_path, check, monkeypatch, last):
    monkeypatch.setattr(loading, "LIMIT_S", 2.0)
    programs = [f"subprocess.Popen(['sleep', '1000'], {how}).pid" for how in ("", "start_new_session=True", "env={'PATH': '/usr/bin:/bin'}")]
    source = f"import os, subprocess, time\nPIDS = [os.getpid(), {', '.join(programs)}]\n"
    source += f"with open({str(tmp_path / 'pids')!r}, 'w') as file:\n    file.write(' '.join(map(str, PIDS)))\n{last}"
    try:
        check(source)
        assert not last.startswith("raise")
    except ConfigError as error:
        assert "ValueError: no" in str(error)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not left


def test_packages_are_found_where_the_run_finds_them(tmp_path, check, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_here_xyz.py").write_text("GOLD = 7\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "lib")])
    check("from only_here_xyz import GOLD\nassert GOLD == 7")
    assert os.listdir(tmp_path / "lib") == ["only_here_xyz.py"]
    with pytest.raises(ConfigError, match="ImportError: cannot import name 'SILVER'"):
        check("from only_here_xyz import SILVER")


def test_a_cluster_and_our_own_rewards_are_not_tried(check, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a process was started")

    with monkeypatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "auto")
        check("raise ValueError('on another machine, perhaps not')")
    monkeypatch.setattr(loading.subprocess, "Popen", never)
    python_files.check_reward(arguments(Path(loading.PACKAGE, "rewards", "math.py")))


def test_it_is_one_of_the_preflights_messages(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("1 / 0" + REWARD)
    monkeypatch.setattr(sys.modules[preflight.__module__], "CHECKS", (python_files.check_reward, python_files.check_agent))
    assert preflight(arguments(tmp_path / "own.py")) == [
        f"--reward.remote_url {tmp_path}/own.py, line 1: ZeroDivisionError: division by zero (while the file was loaded)"
    ]
