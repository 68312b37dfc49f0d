"""Packages that no lock installs, for the tests that need them: taken from this environment, or installed beside it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def with_packages(lock: str, module: str, directory: Path) -> dict[str, str]:
    """The environment of a process that can import `module` of requirements/`lock`.txt, installed into `directory` where it is
    missing here. Skips the test where the package index does not answer."""
    inherited = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if find_spec(module) is not None:
        return os.environ | {"PYTHONPATH": os.pathsep.join(inherited)}
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(directory),
        "-r",
        str(ROOT / f"requirements/{lock}.txt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"requirements/{lock}.txt cannot be installed here: {done.stderr.strip()[-200:]}")
    return os.environ | {"PYTHONPATH": os.pathsep.join([*inherited, str(directory)])}
