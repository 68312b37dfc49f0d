"""A small /dev/shm, really: in a mount namespace with a tmpfs of that size."""

import os
import subprocess
import sys
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.shared_memory import MIB, check_shared_memory, needed, object_store, present

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MOUNT = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'


def small_shm(size: str, *command: str, **options) -> subprocess.CompletedProcess:
    """Run a command where /dev/shm has ``size``."""
    flags = ["-m"] if os.getuid() == 0 else ["-Urm"]
    return subprocess.run(["unshare", *flags, "bash", "-c", MOUNT, size, *command], text=True, capture_output=True, **options)


@pytest.fixture
def namespaces():
    try:
        allowed = small_shm("1m", "true").returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this machine allows no mount namespace")


def python(size: str, code: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "3"}
    return small_shm(size, sys.executable, "-c", code, env=environment, timeout=120)


CHECK = """
from types import SimpleNamespace as N
from qarl_openrlhf.preflight.shared_memory import *
check_shared_memory(N(device="cpu", vllm=N(num_engines=2, tensor_parallel_size={ranks})))
print("passed", present())
"""


@pytest.mark.usefixtures("namespaces")
def test_too_small_for_the_engines():
    done = python("64m", CHECK.format(ranks=2))  # a container's default
    message = f"/dev/shm has {64 * MIB:,} bytes free, and this run needs {needed(2, 2, threads=3):,} (2 engines of 2 ranks)"
    assert done.returncode and f"ConfigError: {message}" in done.stderr
    assert "--shm-size 1g" in done.stderr and "remount,size=1G /dev/shm" in done.stderr and "--vllm.num_engines" in done.stderr
    assert python("320m", CHECK.format(ranks=2)).stdout.split() == ["passed", str(320 * MIB)]
    assert python("4m", CHECK.format(ranks=1)).returncode == 0


@pytest.mark.usefixtures("namespaces")
def test_what_lies_there_counts():
    code = "open('/dev/shm/left', 'wb').write(bytes(64 << 20))\n" + CHECK.format(ranks=2)
    done = python("320m", code)
    assert done.returncode and f"has {256 * MIB:,} bytes free" in done.stderr


def test_a_missing_directory_has_no_room(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    args = N(device="cpu", vllm=N(num_engines=1, tensor_parallel_size=1))
    with pytest.raises(ConfigError, match=f"gone has 0 bytes free, and this run needs {needed(1, 1):,}"):
        check_shared_memory(args, str(tmp_path / "gone"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_shared_memory(args, str(tmp_path / "gone"))


@pytest.mark.usefixtures("namespaces")
def test_the_object_store_leaves_half_or_goes_to_disk(tmp_path):
    code = (
        "from qarl_openrlhf.preflight.shared_memory import *\n"
        f"print(object_store(smallest=80 * MIB, largest=2048 * MIB, on_disk={str(tmp_path / 'store')!r}))"
    )
    assert python("400m", code).stdout.strip() == str((200 * MIB, None))
    note, chosen = python("100m", code).stdout.strip().splitlines()
    assert chosen == str((80 * MIB, str(tmp_path / "store"))) and (tmp_path / "store").is_dir()
    assert "/dev/shm has 104,857,600 bytes free" in note
    assert present(str(tmp_path)) > 0 and object_store(str(tmp_path), smallest=1, largest=5, on_disk="/nowhere") == (5, None)
