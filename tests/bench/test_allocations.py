"""The report of a record of allocations, on a record written out by hand."""

import importlib.util
from pathlib import Path

GIB = 2**30


def frame(name: str, filename: str = "qarl_openrlhf/kernels/a.py") -> dict:
    return {"name": name, "filename": filename, "line": 7}


def test_each_phase_is_taken_at_its_own_peak():
    path = Path(__file__).parents[2] / "benchmarks" / "allocations.py"
    spec = importlib.util.spec_from_file_location("allocations", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    trace = [
        {"action": "alloc", "addr": 1, "size": 4 * GIB, "frames": [frame("weights")]},
        {"action": "alloc", "addr": 2, "size": GIB, "frames": [frame("logits"), frame("backward")]},
        {"action": "free_requested", "addr": 2, "size": GIB},
        {"action": "free_completed", "addr": 2, "size": GIB},
        {"action": "alloc", "addr": 2, "size": 2 * GIB, "frames": []},  # by C++, in a backward
        {"action": "free_completed", "addr": 2, "size": 2 * GIB},
        {"action": "alloc", "addr": 3, "size": 3 * GIB, "frames": [frame("step", "torch/optim/optimizer.py")]},
        {"action": "free_completed", "addr": 9, "size": GIB},  # of before the record
    ]
    assert module.peaks(trace) == {"other": (4 * GIB, 0), "backward": (6 * GIB, 4), "optimizer step": (7 * GIB, 6)}
    lines = module.report(trace).splitlines()
    assert lines[0].startswith("== optimizer step: 7.00 GiB") and lines[3].startswith("== backward: 6.00 GiB")
    assert lines[4:6] == ["   4.000 GiB     1x  kernels/a.py:7:weights", "   2.000 GiB     1x  (autograd)"]
    assert not any("logits" in line for line in lines)
