"""scripts/setup_env.sh for real, on a tree whose locks are empty and whose package builds without any other package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = '''
import zipfile
from pathlib import Path

def _wheel(folder):
    name = "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / name, "w") as wheel:
        wheel.writestr("tiny_marker.py", "")
        wheel.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n")
        wheel.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    return name

def build_editable(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder)

def build_wheel(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder)
'''


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", root / "scripts")
    shutil.copytree(ROOT / "scripts" / "lib", root / "scripts" / "lib")
    (root / "requirements").mkdir()
    for path in (ROOT / "requirements").glob("*.txt"):
        (root / "requirements" / path.name).write_text("")
    (root / "setup.py").write_text("")
    (root / "tiny_backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "tiny_backend"\nbackend-path = ["."]\n[project]\nname = "tiny"\nversion = "1"\n'
    )
    return root


def run(tree, *args, env=None, path=None):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("QARL_", "PIP_"))}
    environment |= {"QARL_PYTHON": getattr(sys, "_base_executable", sys.executable)}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull} | (env or {})
    if path is not None:
        environment["PATH"] = path
    return subprocess.run(
        [shutil.which("bash"), str(tree / "scripts" / "setup_env.sh"), "--cpu", *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


needs_cpu_python = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the CPU stack is for Python 3.11")


@needs_cpu_python
def test_life_of_an_environment(tree):
    venv = tree / ".venv"
    # A step fails: its error is shown, and what is there is not taken for done.
    (tree / "requirements" / "cpu.txt").write_text("torch==0.0.1\n")  # not to be had
    failed = run(tree)
    assert failed.returncode == 1 and "installing the cpu stack" in failed.stderr
    assert "No matching distribution found for torch" in failed.stderr and "PIP_EXTRA_INDEX_URL" in failed.stderr
    assert (venv / ".qarl-incomplete").exists()

    # Half-made (here: even without a Python) is built anew, not tripped over.
    (tree / "requirements" / "cpu.txt").write_text("")
    (venv / "bin" / "python").unlink()
    second = run(tree)
    assert second.returncode == 0, second.stderr
    assert "building it anew" in second.stderr and "is ready" in second.stderr
    assert list(venv.glob("lib/python3.11/site-packages/tiny_marker.py"))
    assert not (venv / ".qarl-incomplete").exists()

    before = os.times()
    third = run(tree)  # nothing to do: at once
    assert third.returncode == 0 and third.stderr == f"setup_env: {venv} is ready (cpu)\n"
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2

    # An environment for the other device is whole: it is somebody's, and stays.
    other = run(tree, "--cuda")
    assert other.returncode == 1 and list(venv.glob("lib/python3.11/site-packages/tiny_marker.py"))
    assert "is an environment of the other kind and whole: name another place for the cuda one (QARL_VENV=.venv-cuda)" in other.stderr
    assert run(tree).stderr == f"setup_env: {venv} is ready (cpu)\n"

    # Another checkout with the same locks takes it over; one with other locks does not.
    marker = venv / "kept"
    marker.touch()
    again = tree.with_name("again")
    shutil.copytree(tree, again, ignore=shutil.ignore_patterns(".venv*"))
    taken = run(again, env={"QARL_VENV": str(venv)})
    assert taken.returncode == 0 and f"has been of {tree}, from now on it is of {again}" in taken.stderr and marker.exists()
    assert run(again, env={"QARL_VENV": str(venv)}).stderr == f"setup_env: {venv} is ready (cpu)\n"
    (tree / "requirements" / "cpu.txt").write_text("# others\n")
    refused = run(tree)
    assert refused.returncode == 1 and f"is whole and of {again}, which has other locks than {tree}" in refused.stderr and marker.exists()
    (tree / "requirements" / "cpu.txt").write_text("")
    assert run(tree).returncode == 0 and marker.exists()

    # A changed setup.py reinstalls this package alone; a changed lock builds anew.
    (tree / "setup.py").write_text("# changed\n")
    assert "installing" not in run(tree).stderr and marker.exists()
    (tree / "requirements" / "cpu.txt").write_text("# changed\n")
    assert "building it anew" in run(tree).stderr and not marker.exists()


def test_foreign_directory_is_refused_and_left_alone(tree, tmp_path):
    other = tmp_path / "mine"
    other.mkdir()
    (other / "precious").write_text("x")
    result = run(tree, env={"QARL_VENV": str(other)})
    assert result.returncode == 1 and "was not made by this script" in result.stderr
    assert (other / "precious").read_text() == "x"


def test_everything_missing_is_one_line(tree, tmp_path):
    tools = tmp_path / "bin"  # no g++, and a Python of another version
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "readlink", "mkdir", "sha256sum", "cut", "cat", "sed", "flock", "uname", "grep", "awk", "df", "ls"):
        (tools / name).symlink_to(shutil.which(name))
    result = run(tree, env={"QARL_PYTHON": "/bin/false"}, path=str(tools))
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("setup_env: missing for the cpu stack: Python 3.11 with venv (QARL_PYTHON=/bin/false is not that); ")
    assert "the C++ compiler g++" in line and not (tree / ".venv").exists()


def test_flock_and_a_python_with_a_space_in_its_path(tree, tmp_path):
    tools = tmp_path / "bin"  # no flock
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "readlink", "mkdir", "sha256sum", "cut", "cat", "sed", "uname", "grep", "awk", "df", "ls"):
        (tools / name).symlink_to(shutil.which(name))
    python = tmp_path / "my python" / "bin of it" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexec {getattr(sys, '_base_executable', sys.executable)} \"$@\"\n")
    python.chmod(0o755)
    result = run(tree, env={"QARL_PYTHON": str(python)}, path=str(tools))
    assert result.returncode == 1 and "flock (Debian: util-linux)" in result.stderr and "command not found" not in result.stderr
    assert ("QARL_PYTHON" in result.stderr) == (sys.version_info[:2] != (3, 11))


def test_unknown_argument(tree):
    result = run(tree, "--gpu")
    assert result.returncode == 2 and "unknown argument '--gpu'" in result.stderr
