"""A CPU with AMX: vLLM's kernels may use the tile registers in every process that has loaded the plugin."""

import os
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


def test_a_w4a16_checkpoint_keeps_its_activations():
    """vLLM's default on such a CPU is 8-bit activations, unasked: in runs, in evaluate and export, and in our `serve`."""
    given = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_INT4_W4A8"}
    runs = "from qarl_openrlhf import runtime; runtime.set_environment('cpu')"
    serve = "import sys; sys.argv = ['x', '--help']; from qarl_openrlhf.patches import vllm_cpu\ntry: vllm_cpu.main()\nexcept SystemExit: pass"
    told = "\nimport os; from vllm import envs; print('W4A8', os.environ['VLLM_CPU_INT4_W4A8'], envs.VLLM_CPU_INT4_W4A8)"
    begun = [
        subprocess.Popen([sys.executable, "-c", program + told], env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for program in (runs, serve)
    ]
    for process in begun:
        out, errors = process.communicate(timeout=300)
        assert "W4A8 0 False" in out, errors[-2000:]
