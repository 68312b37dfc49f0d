import pytest
import torch
from objective_reference import make_batch


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def batch():
    """Eight responses of uneven length, one of them empty, both signs of A and a zero."""
    return make_batch(seed=0)
