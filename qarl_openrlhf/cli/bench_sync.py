"""``python -m qarl_openrlhf.cli.bench_sync``: what a packed push to a vLLM engine costs, beside a BF16 one.

    python -m qarl_openrlhf.cli.bench_sync --shape 8b --schemes bf16 w4a16 --transport nccl --openrlhf    two GPUs
    python -m qarl_openrlhf.cli.bench_sync --shape 8b --schemes w4a16 --transport ipc                     one GPU
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import ray
import torch

from qarl_openrlhf import runtime
from qarl_openrlhf.bench import sync


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench_sync", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(sync.SHAPES))
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w4a16"])
    parser.add_argument("--transport", default="nccl", choices=("nccl", "ipc"))
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--layers", type=int, help="fewer decoder layers")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size of the engine")
    parser.add_argument("--bucket_mb", type=int, default=512)
    parser.add_argument("--verify", default="checksum", choices=("checksum", "off"))
    parser.add_argument("--openrlhf", action="store_true", help="also OpenRLHF's own BF16 push, one RPC a parameter")
    parser.add_argument("--decode", action="store_true", help="decode speed after the first and after the last push")
    parser.add_argument("--out", default="benchmarks/results")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: this measures GPU engines")
    need = 1 if args.transport == "ipc" else 1 + args.tp
    if torch.cuda.device_count() < need:
        parser.error(f"--transport {args.transport} with --tp {args.tp} needs {need} GPUs, this machine has {torch.cuda.device_count()}")

    environment = runtime.set_environment("cuda")
    runtime.start_ray("cuda", runtime.ResourcePlan({"bench": need}), environment, log_to_driver=False)
    directory = sync.write_config(tempfile.mkdtemp(), args.shape, args.layers)
    rows = [measure(args, directory, scheme) for scheme in args.schemes]
    if args.openrlhf:
        rows.append(measure_openrlhf(args, directory))
    record = {
        "command": "python -m qarl_openrlhf.cli.bench_sync " + " ".join(_without_out(argv or sys.argv[1:])),
        "card": f"{need} x {torch.cuda.get_device_name()}",
        "versions": {name: version(name) for name in ("torch", "vllm", "ray", "transformers")} | {"python": platform.python_version()},
        "environment": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "rows": rows,
    }
    short = "h200" if "H200" in record["card"] else "h100" if "H100" in record["card"] else "gpu"
    slow = "_no_p2p" if os.environ.get("NCCL_P2P_DISABLE") == "1" else ""
    path = Path(args.out) / f"sync_{args.shape}_{args.transport}{slow}_{short}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


def measure(args, directory: str, scheme: str) -> dict:
    """Pushes of one scheme; ms are medians over all pushes but the first (which connects)."""
    share = 0.5 if args.transport == "ipc" else 1
    started = time.perf_counter()
    engine = sync.start_engine(directory, scheme, gpus=share * (args.tp if args.transport == "nccl" else 1), tp=args.tp)
    learner = ray.remote(sync.Learner).options(num_gpus=share, num_cpus=0).remote(args.shape, args.layers, scheme)
    try:
        ray.get([engine.weights_state.remote(), learner.connect.remote([engine], args.transport, args.bucket_mb, args.verify)])
        print(f"{args.shape} {scheme}: engine and learner up in {time.perf_counter() - started:.0f} s", flush=True)
        first = ray.get(learner.push.remote())
        decode = [sync.decode_ms(engine)] if args.decode else []
        memory = [ray.get(engine.memory.remote())]
        pushes = [ray.get(learner.push.remote()) for _ in range(args.pushes)]
        decode += [sync.decode_ms(engine)] if args.decode else []
        memory.append(ray.get(engine.memory.remote()))
        quantize = statistics.median(ray.get(learner.quantize_only.remote()) for _ in range(3))
    finally:
        ray.kill(learner)
        ray.kill(engine)
        time.sleep(3)  # the GPU's memory comes back after the processes have ended
    def median(name: str) -> float:
        return statistics.median(push[name] for push in pushes)
    row = {
        "scheme": scheme,
        "pushes": len(pushes),
        "p50_ms": median("total_ms"),
        "min_ms": min(push["total_ms"] for push in pushes),
        "max_ms": max(push["total_ms"] for push in pushes),
        "first_ms": first["total_ms"],
        "connect_ms": first["sync/connect_ms"],
        "quantize_only_ms": quantize,
        "send_ms": median("sync/send_ms"),
        "load_ms": median("sync/load_ms"),
        "verify_ms": median("sync/verify_ms"),
        "finish_ms": median("sync/finish_ms"),
        "bytes": pushes[-1]["sync/bytes"],
        "tensors": pushes[-1]["sync/tensors"],
        "buckets": pushes[-1]["sync/buckets"],
        "checksum_ok": min(push["sync/checksum_ok"] for push in pushes),
        "learner_peak_mb": max(push["learner_peak_mb"] for push in pushes),
        "learner_growth_mb": pushes[-1]["learner_allocated_mb"] - pushes[0]["learner_allocated_mb"],
        "engine_growth_mb": (memory[1]["allocated"] - memory[0]["allocated"]) / 2**20,
        "engine_peak_mb": (memory[1]["peak"] - memory[1]["allocated"]) / 2**20,
        "decode_ms": decode,
    }
    print("  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)
    return row


def measure_openrlhf(args, directory: str) -> dict:
    engine = sync.start_openrlhf_engine(directory, gpus=1)
    learner = ray.remote(sync.Learner).options(num_gpus=1, num_cpus=0).remote(args.shape, args.layers, "bf16")
    try:
        ray.get(learner.join_openrlhf.remote([engine]))
        pushes = [ray.get(learner.push_openrlhf.remote([engine])) for _ in range(1 + max(3, args.pushes // 4))][1:]
    finally:
        ray.kill(learner)
        ray.kill(engine)
        time.sleep(3)
    row = {"scheme": "bf16, OpenRLHF's own push", "pushes": len(pushes), "p50_ms": statistics.median(pushes), "min_ms": min(pushes)}
    print("  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)
    return row


def _without_out(words: list[str]) -> list[str]:
    """The command line without the place of the result, which says nothing about it."""
    at = words.index("--out") if "--out" in words else len(words)
    return words[:at] + words[at + 2 :]


def _short(value) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_short(v) for v in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
