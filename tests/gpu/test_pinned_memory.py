"""A learner's large pinned buffers take what was asked for; PyTorch alone takes the next power of two."""

import subprocess
import sys

import pytest

MIB = 2**20
PROGRAM = """
import sys, torch
from qarl_openrlhf.patches import pinned_memory
if sys.argv[1] == "kept":
    torch.zeros(1, device="cuda")  # whatever the process did before
    assert pinned_memory.keep_sizes() and pinned_memory.keep_sizes()
buffer = torch.empty(80 * 2**20, dtype=torch.uint8, pin_memory=True)
assert buffer.is_pinned()
print(torch.cuda.memory.host_memory_stats()["allocated_bytes.current"])
"""


@pytest.mark.parametrize("how, size", [("kept", 80 * MIB), ("as PyTorch does", 128 * MIB)])
def test_a_pinned_buffer_takes_what_was_asked_for(how, size):
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == size
