"""The report of a record of allocations, on a record written out by hand."""

import importlib.util
from pathlib import Path

import pytest

GIB = 2**30


def frame(name: str, filename: str = "qarl_openrlhf/kernels/a.py") -> dict:
    return {"name": name, "filename": filename, "line": 7}


@pytest.fixture
def module():
    path = Path(__file__).parents[2] / "benchmarks" / "allocations.py"
    spec = importlib.util.spec_from_file_location("allocations", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_what_bench_step_measured_before_is_not_in_its_way(module, tmp_path, monkeypatch):
    """Its result file of other settings ends it, one of the same settings leaves it nothing to run: it gets a directory of its own."""
    given = []

    def bench_step(argv: list[str]) -> int:
        directory = Path(argv[argv.index("--out") + 1])
        given.append(argv)
        assert list(directory.iterdir()) == []
        return 0

    trace = [{"action": "alloc", "addr": 1, "size": GIB, "frames": [frame("weights")]}]
    monkeypatch.setattr(module.bench_step, "main", bench_step)
    monkeypatch.setattr(module.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(module.torch.cuda.memory, "_record_memory_history", lambda **kwargs: None)
    monkeypatch.setattr(module.torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], trace]})
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(module.sys, "argv", ["allocations.py", str(tmp_path / "record"), "--shape", "8b"])
    assert module.main() == 0
    assert given[0][:2] == ["--shape", "8b"]
    assert (tmp_path / "record.1.txt").read_text().startswith("== other: 1.00 GiB")


def test_each_phase_is_taken_at_its_own_peak(module):
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
