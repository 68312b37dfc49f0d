"""A command that owns its process: its status, and what it says last."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

START = """
import atexit, os, sys
from qarl_openrlhf.cli.ending import own_process
atexit.register(lambda: sys.stderr.write("registered\\n"))
def main():
    print("result")
    {end}
own_process(main)
"""


@pytest.mark.parametrize(
    "end, status, said",
    [
        ("pass", 0, ["registered"]),
        ("sys.exit()", 0, ["registered"]),
        ("sys.exit(3)", 3, ["registered"]),
        ("sys.exit('export: no')", 1, ["registered", "export: no"]),
        ("raise KeyError('name')", 1, ["registered", "Traceback (most recent call last):", ..., "KeyError: 'name'"]),
        ("raise KeyboardInterrupt", 130, ["registered", "Traceback (most recent call last):", ..., "KeyboardInterrupt"]),
    ],
)
def test_status_and_last_line(end, status, said):
    done = subprocess.run([sys.executable, "-c", START.format(end=end)], capture_output=True, text=True, timeout=100)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (status, "result\n")
    if ... in said:
        assert (lines[:2], lines[-1]) == (said[:2], said[-1])
    else:
        assert lines == said


@pytest.mark.parametrize("last, status", [("main()", -signal.SIGABRT), ("own_process(main)", 0)])
def test_what_native_libraries_do_when_the_interpreter_is_gone_is_not_reached(last, status):
    """Registered where nanobind's list of leaks is; here it is an abort, which cannot be overlooked."""
    register = "import ctypes; ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)"
    program = START.format(end="pass").replace("own_process(main)", f"{register}\n{last}")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100).returncode == status


SIGNALLED = """
import os, signal, sys, threading, time
from qarl_openrlhf.cli.ending import SignalEnding
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, also by what it starts
{before}
with SignalEnding("command") as ending:
    ending.advice = lambda: ": advice"
    signal.signal(signal.SIGTERM, lambda *_: print("another's handler"))
    ending.take()
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep({wait})
    finally:
        print("given back")
term, interrupt = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
print("went on", term is signal.SIG_DFL, interrupt is signal.default_int_handler)
"""


@pytest.mark.parametrize("name, word", [("SIGTERM", "terminated"), ("SIGINT", "interrupted"), ("SIGHUP", "terminated")])
def test_a_signal_is_one_line_and_the_status(name, word):
    program = SIGNALLED.format(before="", name=name, wait=60)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (128 + signal.Signals[name], "given back\n")
    assert done.stderr == f"command: {word} ({name}): advice\n"


def test_a_closed_terminal_ends_it_with_its_status_and_gives_back(tmp_path):
    """A real one: the kernel sends SIGHUP when its other end is closed, and writing to it fails from then on."""
    given = tmp_path / "given"
    program = SIGNALLED.format(before="", name="SIGHUP", wait=60).replace("os.kill(os.getpid(), signal.SIGHUP)", "print('up', flush=True)")
    program = program.replace('print("given back")', f"open({str(given)!r}, 'w').close(); print('given back')")
    leader, follower = pty.openpty()
    login = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=follower, stdout=follower, stderr=follower, start_new_session=True, preexec_fn=login
    )
    os.close(follower)
    assert b"up" in os.read(leader, 100)
    os.close(leader)
    assert process.wait(50) == 128 + signal.SIGHUP and given.exists()


def test_an_ignored_signal_stays_ignored_and_handlers_are_put_back():
    program = SIGNALLED.format(before="signal.signal(signal.SIGINT, signal.SIG_IGN)", name="SIGINT", wait=0)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "given back\nwent on True False\n", "")


def test_a_second_signal_ends_at_once():
    program = SIGNALLED.format(before="", name="SIGTERM", wait=60)
    program = program.replace('print("given back")', "os.kill(os.getpid(), signal.SIGTERM)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
