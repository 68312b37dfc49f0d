"""A CPU with AMX: vLLM's kernels may use the tile registers in every process that has loaded the plugin."""

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import ctypes
def granted():
    mask = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0  # arch_prctl(ARCH_GET_XCOMP_PERM)
    return bool(mask.value >> 18 & 1)  # XTILEDATA
before = granted()
from qarl_openrlhf.engine import plugin
plugin.register()
print(before, granted())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a CPU with AMX")
def test_the_plugin_asks_for_the_tile_registers():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["False True"], done.stderr[-2000:]
