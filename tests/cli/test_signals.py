"""evaluate and export that are told to stop: one line, 128 + signal, nothing left; and what a killed one left goes next time."""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tiny_models import save_tiny_model

# Runs a command that signals itself where it imports a module: "torch" while its own imports go on, a model's file when weights are
# loaded, safetensors.torch's save_file when they are written, "vllm" before an engine.
SIGNALLED = """
import os, runpy, signal, sys
command, number, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Moment:
    def find_spec(name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(Moment)
            os.kill(os.getpid(), number)

def at_write(event, args):
    if moment == "write" and event == "open" and str(args[0]).endswith("config.json") and ".export-" in str(args[0]) and "w" in str(args[1]):
        os.kill(os.getpid(), number)

sys.meta_path.insert(0, Moment)
sys.addaudithook(at_write)
sys.argv = [command, *sys.argv[4:]]
runpy.run_module(f"qarl_openrlhf.cli.{command}", run_name="__main__", alter_sys=True)
"""
LOADING = "transformers.models.llama.modeling_llama"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("signals") / "model", "llama", hidden=128)


def signalled(command: str, number: signal.Signals, moment: str, model: str, directory) -> subprocess.CompletedProcess:
    sums = directory.parent / f"{directory.name}.jsonl"
    sums.write_text(json.dumps({"problem": "1 + 1", "answer": "2"}) + "\n")
    words = [model, "--out", str(directory / "out"), "--scheme", "w8a8"]
    words += ["--tasks", f"sums={sums}", "--max_tokens", "8", "--workers", "1"] if command == "evaluate" else []
    program = [sys.executable, "-c", SIGNALLED, command, str(int(number)), moment, *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    "command, moments",
    [("evaluate", ("torch", LOADING, "vllm")), ("export", ("torch", LOADING, "write"))],
)
@pytest.mark.parametrize("number, word", [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_one_line_and_nothing_left(model, tmp_path, command, moments, number, word):
    directories = [tmp_path / moment for moment in moments]
    for directory in directories:
        directory.mkdir()
    with ThreadPoolExecutor() as side_by_side:
        all_done = list(side_by_side.map(lambda moment: signalled(command, number, moment, model, tmp_path / moment), moments))
    line = f"{command}: {word} ({number.name})"
    for moment, directory, done in zip(moments, directories, all_done, strict=True):
        assert (done.returncode, done.stderr.splitlines()[-1]) == (128 + number, line), (moment, done.stderr[-2000:])
        assert "Traceback" not in done.stderr, moment
        assert not list(directory.iterdir()), moment


@pytest.mark.parametrize("command, moment", [("evaluate", "vllm"), ("export", "write")])
def test_what_a_killed_one_left_goes_with_the_next(model, tmp_path, command, moment):
    directory = tmp_path / "d"
    directory.mkdir()
    left = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert signalled(command, number, moment, model, directory).returncode in (-signal.SIGKILL, 128 + signal.SIGTERM)
        left.append([path.name for path in directory.rglob("*") if path.name.startswith(".") and path.is_dir()])
    assert len(left[0]) == {"evaluate": 1, "export": 2}[command] and left[1] == []
