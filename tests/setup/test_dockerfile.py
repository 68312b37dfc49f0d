"""The Dockerfile, which cannot be built here: its paths exist, and it gives scripts/setup_env.sh --cuda what that asks for."""

import fnmatch
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STEPS = [
    tuple(line.split(maxsplit=1)) for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line and not line.startswith("#")
]
SETUP = (ROOT / "scripts" / "setup_env.sh").read_text()
PYTHON = re.search(r"cuda\) python_version=(\S+)", SETUP)[1]


def test_it_copies_what_is_there_and_set_up_needs():
    copies = [shlex.split(words) for step, words in STEPS if step == "COPY"]
    assert copies and all((ROOT / source).exists() for *sources, _ in copies for source in sources)
    ignored = [
        line.rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    needed = [
        "scripts/setup_env.sh",
        "scripts/lib/common.sh",
        "scripts/warm_imports.py",
        "requirements/cuda.txt",
        "setup.py",
        "pyproject.toml",
    ]
    needed += ["qarl_openrlhf/__init__.py", "qarl_openrlhf/rewards/math.py", "README.md"]
    for path in needed:
        assert (ROOT / path).is_file()
        parts = [path, *map(str, list(Path(path).parents)[:-1])]
        assert not any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in ignored), path


def test_set_up_finds_its_python_and_tools():
    (image,) = [words for step, words in STEPS if step == "FROM"]
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-devel-ubuntu24\.04", image)  # CUDA 13 is the lock's; 24.04 has Python 3.12
    runs = [words for step, words in STEPS if step == "RUN"]
    (packages,) = [
        set(shlex.split(words.split("install", 1)[1].split("&&")[0])) for words in runs if "apt-get install" in words
    ]
    assert {"build-essential", f"python{PYTHON}", f"python{PYTHON}-dev", f"python{PYTHON}-venv"} <= packages
    assert [words.split()[:2] for words in runs if "setup_env" in words] == [["scripts/setup_env.sh", "--cuda"]]
    assert "--cpu | --cuda) kind=${arg#--}" in SETUP


def test_paths_agree_and_the_command_is_ours():
    (directory,) = [words for step, words in STEPS if step == "WORKDIR"]
    assert f"ENV PATH={directory}/.venv/bin:$PATH" in TEXT
    assert set(re.findall(r'\$PWD/runs:(\S+)/runs"', TEXT)) == {directory}
    (command,) = [words for step, words in STEPS if step == "CMD"]
    module = re.search(r'"-m", "([\w.]+)"', command)[1]
    assert find_spec(module) is not None
    for script in re.findall(r"bash (scripts/\S+)", TEXT):
        assert (ROOT / script).is_file(), script
