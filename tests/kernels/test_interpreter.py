"""Runs the bit tests of the kernels under Triton's interpreter, in a process of their own.

TRITON_INTERPRET must be set before anything imports Triton, and must not leak into the tests of other packages.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the same tests run as they are")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreted")
def test_the_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    families = ("weight_kernels", "activation_kernels", "gemm_kernels", "digest_kernel", "moe_kernels", "token_log_probs")
    files = [str(HERE / f"test_{family}.py") for family in families]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
