"""Each patch does what it says, and what it mends is really broken without it."""

import socket
import subprocess
import sys

import pytest
import torch

from qarl_openrlhf.patches import PatchError, require_version

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="mends OpenRLHF on machines without CUDA")


def run_python(code: str) -> subprocess.CompletedProcess:
    """``code`` in a fresh interpreter: patches change modules for good, so both sides need a process of their own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_version_guard_names_package_installed_and_supported():
    assert require_version("openrlhf", "==0.11.2") == "0.11.2"
    with pytest.raises(PatchError, match=r"openrlhf 0\.11\.2 is installed.*openrlhf==9\.9"):
        require_version("openrlhf", "==9.9")
    with pytest.raises(PatchError, match="no-such-package is not installed"):
        require_version("no-such-package", ">=1")


UNPATCHED = """
import torch
from contextlib import suppress
broken = []
try:
    import openrlhf.models
except ModuleNotFoundError as error:
    broken.append(error.name)
try:
    torch.cuda.current_device()
except Exception as error:
    broken.append(type(error).__name__)
print(broken)
"""

PATCHED = """
import sys, importlib.util, torch
from qarl_openrlhf import patches
patches.apply(); patches.apply()
from openrlhf.models import ring_attn_utils
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.trainer.ray import launcher, vllm_engine
from openrlhf.utils.deepspeed import deepspeed as host
from transformers.utils import is_flash_attn_2_available
from qarl_openrlhf import runtime
assert torch.cuda.current_device() == "cpu" and torch.cuda.synchronize() is None
assert NaiveReplayBuffer(4).target_device == torch.device("cpu")
assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"], "stand-ins left behind"
assert importlib.util.find_spec("flash_attn") is None and not is_flash_attn_2_available()
assert launcher.placement_group is vllm_engine.placement_group is runtime.placement_group
x = torch.randn(2, 5, 3); mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
tokens, indices, cu, longest, lengths = ring_attn_utils.unpad_input(x, mask)
assert cu.tolist() == [0, 3, 5] and longest == 3 and lengths.tolist() == [3, 2]
assert torch.equal(tokens, torch.cat([x[0, :3], x[1, :2]]))
assert torch.equal(ring_attn_utils.pad_input(tokens, indices, 2, 5), x * mask[..., None])
import os; os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
assert host.init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("dp", "sp", "tp")).device_type == "cpu"
print("patched")
"""


DISTRIBUTED = """
import os, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
from qarl_openrlhf import patches
if sys.argv[2] == "patched":
    patches.apply()
import deepspeed
from deepspeed.ops.op_builder import OpBuilder
OpBuilder.load = lambda self, *args, **kwargs: print("compiled", self.NAME)
deepspeed.init_distributed("gloo")
import torch
x = torch.ones(3)
deepspeed.comm.all_reduce(x)
assert torch.equal(x, torch.ones(3))
print("done")
"""


@without_cuda
@pytest.mark.parametrize("state", ["patched", pytest.param("not patched", marks=pytest.mark.slow)])
def test_nothing_is_compiled_when_deepspeed_makes_its_process_group(state):
    """Of OpenRLHF's start; a compiler run there also left locks behind that the next start waited for without end."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-c", DISTRIBUTED, str(port), state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ("compiled" in done.stdout) == (state != "patched"), done.stdout + done.stderr
    if state == "patched":
        assert done.stdout.strip().endswith("done"), done.stderr


@without_cuda
def test_openrlhf_is_broken_without_the_patches():
    done = run_python(UNPATCHED)
    assert "'flash_attn'" in done.stdout and len(done.stdout.split(",")) == 2, done.stdout + done.stderr


@without_cuda
def test_patches_make_openrlhf_work_without_cuda_and_flash_attn():
    done = run_python(PATCHED)
    assert done.returncode == 0 and done.stdout.strip().endswith("patched"), done.stdout + done.stderr[-3000:]
