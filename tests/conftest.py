"""The process environment of the tests: the package's own, set before anything imports torch or starts Ray."""

import gc
import os
import signal

gc.disable()  # until the tests are collected: a fifth of the time that all these imports take

import pytest

from qarl_openrlhf import runtime

runtime.set_environment("cuda" if os.path.exists("/dev/nvidia0") else "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here or come from packages
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job that a shell runs in the background ignores it, and so would its children


@pytest.fixture(scope="module")
def small_ray():
    """A Ray head of two cores, for tests of what Ray makes of calls and errors."""
    import ray

    if ray.is_initialized():  # the head of a directory whose tests share one
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "180")  # as runtime.COMMON_ENVIRONMENT: for a busy machine
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def largest_mapping() -> int:
    """Bytes of this process's largest piece of private writable memory, touched or not."""
    pieces = [line.split(maxsplit=2) for line in open("/proc/self/maps")]
    spans = [[int(end, 16) for end in span.split("-")] for span, mode, *_ in pieces if mode[1] == "w" and mode[3] == "p"]
    return max(end - start for start, end in spans)


@pytest.fixture(autouse=True, scope="module")
def ray_can_still_be_started(request):
    """Linux refuses to fork a process, as Ray's start does, when one of its mappings is larger than the machine's memory, although
    nothing ever touched it; neighbours count as one."""
    yield
    assert (found := largest_mapping()) < MEMORY / 4, f"after {request.node.nodeid}, {found / 2**30:.1f} GiB are mapped in one piece"


def pytest_collection_finish():
    """The garbage collector leaves the modules that are loaded now alone. A full pass over them takes half a second, in which no
    thread of this process runs, those that wait for a moment of a run included: 13 s of the first 700 tests, 3 s so."""
    gc.enable()
    gc.collect()
    gc.freeze()
