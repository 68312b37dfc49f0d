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
    # Two halves side by side: the interpreter uses one core.
    halves = ("moe_kernels", "activation_kernels"), ("weight_kernels", "gemm_kernels", "token_log_probs", "digest_kernel")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider"]
    runs = [
        subprocess.Popen(
            [*command, *(str(HERE / f"test_{family}.py") for family in half)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for half in halves
    ]
    try:
        for run in runs:
            output = run.communicate(timeout=300)[0]
            assert run.returncode == 0 and " passed" in output, output[-4000:]
    finally:
        for run in runs:
            run.kill()
