"""The process environment of the tests: the package's own, set before anything imports torch or starts Ray."""

import os

from qarl_openrlhf import runtime

runtime.set_environment("cuda" if os.path.exists("/dev/nvidia0") else "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here or come from packages
