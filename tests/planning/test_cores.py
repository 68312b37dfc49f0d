"""Cores that a process may use: those it may run on, and no more than its container's quota."""

import math

import pytest

from qarl_openrlhf import runtime


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_quota(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert runtime.cpu_quota(tmp_path) == cores


@pytest.mark.parametrize("quota, expected", [(math.inf, 8), (3, 3), (64, 8), (0, 1)])
def test_the_smaller_of_affinity_and_quota(monkeypatch, quota, expected):
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(runtime, "cpu_quota", lambda: quota)
    assert runtime.available_cpus() == expected
