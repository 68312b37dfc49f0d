"""Time and peak memory of each objective's loss and gradient; writes benchmarks/results/objectives-DEVICE.json.

    python benchmarks/objectives.py [--device cuda] [--shape 64 16384] [--repeats 5] [--threads 1] [--objectives tbpo]

Each objective runs in processes of its own. Peak memory is what the call adds to its inputs and the gradient's buffer:
CUDA's allocator says it; on CPU (Linux) it is the high-water mark of resident memory, in a process whose malloc gives
freed tensors back at once (so that it is not the one that is timed).
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import statistics
import time
from pathlib import Path

import torch

from qarl_openrlhf.objectives import build_objective, list_objectives


def inputs(rows: int, width: int, device: str) -> list[torch.Tensor]:
    """A batch after a few updates: lengths uneven, every region of every objective met."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, generator=generator)
    log_probs = old + torch.randn(rows, width, generator=generator) * 0.1
    rollout = old + torch.randn(rows, width, generator=generator) * 0.05
    mask = torch.arange(width) < torch.randint(width // 4, width + 1, (rows, 1), generator=generator)
    return [x.to(device) for x in (log_probs, old, rollout, torch.randn(rows, generator=generator), mask)]


def resident_kb(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def prepare_step(name: str, device: str, shape: list[int], threads: int):
    """A function that computes loss and gradient once and returns when they are there."""
    torch.set_num_threads(threads)
    objective = build_objective(name)
    small = inputs(2, 64, device)
    objective(small[0].requires_grad_(), *small[1:]).loss.backward()  # what only the first call ever pays
    log_probs, *rest = inputs(*shape, device)
    log_probs.requires_grad_()
    log_probs.grad = torch.zeros_like(log_probs)

    def step() -> None:
        objective(log_probs, *rest).loss.backward()
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return step


def peak_mib(name: str, device: str, shape: list[int], threads: int) -> float:
    step = prepare_step(name, device, shape, threads)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now
    before = resident_kb("VmRSS")
    step()
    return (resident_kb("VmHWM") - before) / 2**10


def milliseconds(name: str, device: str, shape: list[int], threads: int, repeats: int) -> list[float]:
    step = prepare_step(name, device, shape, threads)
    step()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def in_own_process(function, *args):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found.group(1) if found else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--shape", type=int, nargs=2, default=[64, 16384], metavar=("ROWS", "TOKENS"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--objectives", default=",".join(list_objectives()))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    results = []
    print(f"{args.shape} on {device_name(device)}\n{'objective':<14} {'weight':<6} {'ms':>9} {'peak MiB':>9}")
    for name in args.objectives.split(","):
        times = in_own_process(milliseconds, name, device, args.shape, args.threads, args.repeats)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # glibc reads it when a process starts
        peak = in_own_process(peak_mib, name, device, args.shape, args.threads)
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        weight, median = build_objective(name).hyperparameters["is_weight"], statistics.median(times)
        print(f"{name:<14} {weight:<6} {median:>9.2f} {peak:>9.1f}", flush=True)
        results.append(
            {
                "objective": name,
                "is_weight": weight,
                "ms_median": round(median, 2),
                "ms_min": round(min(times), 2),
                "peak_mib": round(peak, 1),
            }
        )
    out = args.out or Path(__file__).parent / "results" / f"objectives-{device.split(':')[0]}.json"
    about = {"device": device_name(device), "torch": torch.__version__, "threads": args.threads, "shape": args.shape}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**about, "repeats": args.repeats, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
