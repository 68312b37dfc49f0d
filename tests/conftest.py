"""The process environment of the tests: the package's own, set before anything imports torch or starts Ray."""

import gc
import os
import signal

from qarl_openrlhf import runtime

runtime.set_environment("cuda" if os.path.exists("/dev/nvidia0") else "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here or come from packages
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job that a shell runs in the background ignores it, and so would its children


def pytest_collection_finish():
    """The garbage collector leaves the modules that are loaded now alone. A full pass over them takes half a second, in which no
    thread of this process runs, those that wait for a moment of a run included: 13 s of the first 700 tests, 3 s so."""
    gc.collect()
    gc.freeze()
