"""Which kernels a learner's rollout ran, by the time they took on the device (on a CPU: which operations)."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 40


def profiled(job: Callable[[], object], device: torch.device) -> list[dict]:
    """[{name, calls, ms}] of one call of ``job``, longest first. Recorded are device kernels alone, which do not overlap, not the
    operations that started them."""
    on_card = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as recorded:
        job()
        if on_card:
            torch.cuda.synchronize()
    rows = []
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if on_card else event.self_cpu_time_total
        if microseconds:
            rows.append({"name": event.key, "calls": event.count, "ms": microseconds / 1e3})
    return sorted(rows, key=lambda row: -row["ms"])


def lines(rows: list[dict]) -> list[str]:
    """The longest, with their share of the whole."""
    total = sum(row["ms"] for row in rows)
    shown = [f"{row['ms']:9.2f} ms {row['ms'] / total:6.1%} {row['calls']:6d} x  {row['name'][:120]}" for row in rows[:SHOWN]]
    return [f"{total:9.2f} ms of kernels", *shown]
