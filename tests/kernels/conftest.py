import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device():
    """Where the kernels run: the card, or the CPU under Triton's interpreter."""
    if torch.cuda.is_available() and not INTERPRETED:
        return "cuda"
    if not INTERPRETED:
        pytest.skip("Triton kernels need a CUDA device, or TRITON_INTERPRET=1 (test_interpreter.py starts that)")
    return "cpu"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if not torch.cuda.is_available() else threads)
    yield
    torch.set_num_threads(threads)
