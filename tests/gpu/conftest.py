"""A Ray head on the machine's GPUs, for tests of vLLM's own low-bit kernels under published weights.

    python -m pytest tests/gpu -q        one GPU: colocated, transport ipc; two or more: transport nccl, too
"""

import os

import pytest
import torch

pytestmark = pytest.mark.gpu


def pytest_collection_modifyitems(items):
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def cluster():
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # a tensor parallel engine beside others asks Ray for none
    import ray

    from qarl_openrlhf import runtime

    environment = runtime.set_environment("cuda")
    runtime.start_ray("cuda", runtime.ResourcePlan({"engines": 1}), environment, log_to_driver=False)
    yield
    ray.shutdown()
