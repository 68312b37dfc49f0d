"""What a learner's memory was allocated by, at its peaks: `bench_step` under PyTorch's record of all allocations.

    python benchmarks/allocations.py OUT --shape 30b-a3b --only learner --schemes w4a16 --layers 1,2,3 ...
    torchrun --nproc-per-node 2 benchmarks/allocations.py OUT ... --ds.zero_stage 3

The flags are bench_step's, its times and file are not kept: recording slows it. Writes OUT.RANK.txt: for the step of the optimizer, backward and the rest, the moment at which most was
allocated, and the code that had allocated it. Frees are recorded without their stacks: asking for a stack while an exception is under way,
such as that by which a checkpoint ends its recomputation early, loses the exception.
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from qarl_openrlhf.cli import bench_step

GIB = 2**30
WRAPPERS = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_tensor.py")


def place(frames: list[dict], depth: int = 7) -> str:
    """The innermost Python frames; a backward of C++ has none."""
    own = [f for f in frames if f["filename"].endswith(".py") and not f["filename"].endswith(WRAPPERS)]
    lines = [f"{Path(f['filename']).parent.name}/{Path(f['filename']).name}:{f['line']}:{f['name']}" for f in own[:depth]]
    return " < ".join(lines) or "(autograd)"


def phase(frames: list[dict]) -> str:
    names = {frame["name"] for frame in frames}
    if "step" in names and any("optim" in frame["filename"] for frame in frames):
        return "optimizer step"
    return "backward" if "backward" in names or not frames else "other"


def peaks(trace: list[dict]) -> dict[str, tuple[int, int]]:
    """{phase: (bytes, index of the allocation)}."""
    living, total, highest = {}, 0, {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            living[event["addr"]] = event["size"]
            total += event["size"]
            name = phase(event.get("frames", []))
            highest[name] = max(highest.get(name, (0, 0)), (total, index))
        elif event["action"] == "free_completed":
            total -= living.pop(event["addr"], 0)
    return highest


def living(trace: list[dict]) -> list[dict]:
    held = {}
    for event in trace:
        if event["action"] == "alloc":
            held[event["addr"]] = event
        elif event["action"] == "free_completed":
            held.pop(event["addr"], None)
    return list(held.values())


def report(trace: list[dict]) -> str:
    lines = []
    for name, (size, at) in sorted(peaks(trace).items(), key=lambda item: -item[1][0]):
        lines.append(f"== {name}: {size / GIB:.2f} GiB with what {place(trace[at].get('frames', []), 12)} allocates")
        sizes, counts = Counter(), Counter()
        for event in living(trace[: at + 1]):
            code = place(event.get("frames", []))
            sizes[code] += event["size"]
            counts[code] += 1
        lines += [f"{held / GIB:8.3f} GiB {counts[code]:5d}x  {code}" for code, held in sizes.most_common() if held > 8e6]
    return "\n".join(lines) + "\n"


def main() -> int:
    out, device = sys.argv[1], int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    torch.cuda.memory._record_memory_history(context="alloc", max_entries=3_000_000, stacks="python")
    with tempfile.TemporaryDirectory() as scratch:  # beside a file of other settings bench_step would end, beside its own measure nothing
        status = bench_step.main([*sys.argv[2:], "--out", scratch])
    Path(f"{out}.{device}.txt").write_text(report(torch.cuda.memory._snapshot()["device_traces"][device]), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
