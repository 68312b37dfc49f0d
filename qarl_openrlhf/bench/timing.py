"""Device times of several alternatives of one job, measured in turn so that clocks and heat treat them alike."""

import statistics
from collections.abc import Callable

import torch

_FLUSH_BYTES = 256 << 20  # several times the L2


def times_us(jobs: dict[str, Callable], repeats: int = 15, graph: bool = True) -> dict[str, float]:
    """Median microseconds of each job on the device, L2 flushed before each repeat, jobs taken in turn.

    graph: replay a CUDA graph of the job, so that launch gaps of the host stay out of it.
    """
    ready = {name: _captured(job) if graph else job for name, job in jobs.items()}
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = {name: [] for name in jobs}
    for repeat in range(repeats + 2):
        for name, job in ready.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            job()
            end.record()
            if repeat >= 2:
                events[name].append((start, end))
        if repeat % 4 == 0:
            torch.cuda.synchronize()  # or thousands of kernels queue up
    torch.cuda.synchronize()
    return {name: 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def _captured(job: Callable) -> Callable:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles and tunes before the capture
            job()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        job()
    return captured.replay


def peak_mib(job: Callable) -> float:
    """Most memory that one call holds at a time, above what was allocated before, in MiB; its result included."""
    job()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = job()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_job(moved: float) -> Callable:
    """A plain elementwise kernel that reads and writes ``moved`` bytes in all: what bandwidth a job of that size can have."""
    a = torch.randint(0, 2**31, (max(int(moved) // 16, 1),), dtype=torch.int64, device="cuda")
    b = torch.empty_like(a)
    return lambda: torch.bitwise_not(a, out=b)


def copy_gb_s() -> float:
    """Bandwidth of a device-to-device copy of 2 GiB, bytes read plus bytes written."""
    return (4 << 30) / times_us({"copy": copy_job(4 << 30)})["copy"] / 1e3
