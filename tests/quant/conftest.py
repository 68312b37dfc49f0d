import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Bits and timings that do not depend on how many tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
