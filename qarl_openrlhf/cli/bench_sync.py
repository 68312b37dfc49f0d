"""``python -m qarl_openrlhf.cli.bench_sync``: what a packed push to a vLLM engine costs, beside a BF16 one.

    python -m qarl_openrlhf.cli.bench_sync --shape 8b --schemes bf16 w4a16 --transport nccl --openrlhf    two GPUs
    python -m qarl_openrlhf.cli.bench_sync --shape 8b --schemes w4a16 --transport ipc                     one GPU
    python -m qarl_openrlhf.cli.bench_sync --shape tiny --transport gloo --decode                 a CPU: that it runs
    python -m qarl_openrlhf.cli.bench_sync --shape 30b-a3b --schemes w4a16 --learner_ranks 2 --tp 2 --expert_parallel    four GPUs

With --learner_ranks the master weights lie in shards on so many GPUs, as ZeRO-3 leaves them: all ranks gather a tensor, quantize it and
free it, and rank 0 publishes. Where the time of a push goes (ms): quantize_only, everything quantized and gathered by all ranks, nothing
sent; gather_only, gathered alone; gather, what rank 0's host spends in gathers during a push; send, what it waits for engines; load and
verify, of the slowest engine rank; finish. published is a number of the tensors that were pushed, bytes and names: the same for every
--learner_ranks, --tp and --transport on cards of one kind.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray
import torch

from qarl_openrlhf import runtime
from qarl_openrlhf.bench import sync, sync_ranks, sync_room
from qarl_openrlhf.bench.step_plan import runnable
from qarl_openrlhf.cli.arguments import count
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.machine import machine_bytes
from qarl_openrlhf.quant.errors import QuantError


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    device = "cpu" if args.transport == "gloo" else "cuda"
    need = 1 if args.transport != "nccl" else args.learner_ranks + args.tp
    _refuse(parser, args, device, need)
    environment = runtime.set_environment(device)
    runtime.start_ray(device, runtime.ResourcePlan({"bench": need}), environment, log_to_driver=False)
    directory = sync.write_config(tempfile.mkdtemp(), args.shape, args.layers)
    record = {
        "command": "python -m qarl_openrlhf.cli.bench_sync " + " ".join(_without_out(sys.argv[1:] if argv is None else argv)),
        "card": f"{need} x {torch.cuda.get_device_name()}" if device == "cuda" else "CPU",
        "versions": versions("torch", "vllm", "ray", "transformers"),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "rows": [],
    }
    path = Path(args.out) / result_name(args, record["card"])
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs = [lambda scheme=scheme: measure(args, directory, scheme) for scheme in args.schemes]
    if args.openrlhf:
        jobs.append(lambda: measure_openrlhf(args, directory))
    for job in jobs:  # a run that ends early leaves the rows it had
        record["rows"].append(job())
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_sync", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(sync.SHAPES), help="shape of the model (default: 8b)")
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w4a16"], help="default: bf16 w4a16")
    parser.add_argument("--transport", default="nccl", choices=("nccl", "ipc", "gloo"), help="default: nccl")
    parser.add_argument("--pushes", type=count, default=20, help="measured pushes, after a first that is not (default: 20)")
    parser.add_argument("--layers", type=count, help="fewer decoder layers")
    parser.add_argument("--learner_ranks", type=count, default=1, help="GPUs (gloo: processes) that share the master weights")
    parser.add_argument("--tp", type=count, default=1, help="tensor parallel size of the engine")
    parser.add_argument("--expert_parallel", action="store_true", help="the engine's ranks hold whole experts, not parts of each")
    parser.add_argument("--bucket_mb", type=count, default=512, help="size of a bucket, as --sync.bucket_mb (default: 512)")
    parser.add_argument("--verify", default="checksum", choices=("checksum", "off"), help="as --sync.verify (default: checksum)")
    parser.add_argument("--openrlhf", action="store_true", help="also OpenRLHF's own BF16 push, one RPC a parameter")
    parser.add_argument("--decode", action="store_true", help="decode speed after the first and after the last push")
    parser.add_argument("--out", default="benchmarks/results", help="directory of sync_<shape>_<transport>_<card>.json")
    return parser


def _refuse(parser: argparse.ArgumentParser, args, device: str, need: int) -> None:
    """End the command, before anything starts, for what cannot be measured."""
    if args.openrlhf and sync.SHAPES[args.shape]["model_type"] == "qwen3_moe":
        parser.error("--openrlhf pushes a whole model, and of experts the learner holds one layer: use a dense --shape")
    if args.openrlhf and device == "cpu":
        parser.error("--openrlhf needs GPUs: OpenRLHF's own push has no CPU transport")
    if args.transport == "ipc" and args.tp > 1:
        parser.error(f"--tp {args.tp} with --transport ipc: learner and engine share one GPU; use --transport nccl")
    ranks = f"--learner_ranks {args.learner_ranks}"
    if args.transport == "ipc" and args.learner_ranks > 1:
        parser.error(f"{ranks} with --transport ipc: each rank would need an engine on its GPU; use --transport nccl")
    if args.openrlhf and args.learner_ranks > 1:
        parser.error(f"--openrlhf with {ranks}: OpenRLHF's own push is measured from one learner; leave one of them out")
    problem = sync_room.split_problem(args)
    if problem:
        parser.error(problem)
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"no CUDA device for --transport {args.transport}; on a CPU only gloo runs, to see that everything does")
    there = torch.cuda.device_count()
    if device == "cuda" and there < need:
        parser.error(f"--transport {args.transport} with {ranks} and --tp {args.tp} needs {need} GPUs, this machine has {there}")
    try:
        args.schemes, _ = runnable(args.schemes, device)
        card = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        for scheme in args.schemes:
            sync_room.check(args, scheme, card)
            if device == "cpu":
                sync_room.check_host(args, scheme, machine_bytes())
    except (ConfigError, QuantError) as error:
        parser.error(str(error))


def result_name(args, card: str) -> str:
    short = next((name.lower() for name in ("H200", "H100", "CPU") if name in card), "gpu")
    slow = "_no_p2p" if os.environ.get("NCCL_P2P_DISABLE") == "1" else ""
    shards = f"_zero3x{args.learner_ranks}" if args.learner_ranks > 1 else ""
    parallel = (f"_tp{args.tp}" if args.tp > 1 else "") + ("_ep" if args.expert_parallel else "")
    fewer = f"_{args.layers}layers" if args.layers else ""
    return f"sync_{args.shape}_{args.transport}{shards}{parallel}{fewer}{slow}_{short}.json"


def measure(args, directory: str, scheme: str) -> dict:
    """Pushes of one scheme; ms are medians over all pushes but the first (which connects)."""
    device = "cpu" if args.transport == "gloo" else "cuda"
    share = {"ipc": 0.5, "nccl": 1, "gloo": 0}[args.transport]
    started = time.perf_counter()
    gpus = share * (args.tp if args.transport == "nccl" else 1)
    experts = {"enable_expert_parallel": True} if args.expert_parallel else {}
    engine = sync.start_engine(directory, scheme, gpus=gpus, tp=args.tp, device=device, **experts)
    learners = sync_ranks.Learners(args.shape, args.layers, scheme, ranks=args.learner_ranks, gpus=share, device=device)
    try:
        learners.connect([engine], args.transport, args.bucket_mb, args.verify)
        ray.get(engine.weights_state.remote())
        print(f"{args.shape} {scheme}: engine and learner up in {time.perf_counter() - started:.0f} s", flush=True)
        first = learners.push()
        decode = [sync.decode_ms(engine)] if args.decode else []
        memory = [ray.get(engine.memory.remote())]
        pushes = [learners.push() for _ in range(args.pushes)]
        decode += [sync.decode_ms(engine)] if args.decode else []
        memory.append(ray.get(engine.memory.remote()))
        quantize = statistics.median(learners.quantize_only() for _ in range(3))
        gather = statistics.median(learners.gather_only() for _ in range(3))
        last = learners.push(fingerprint=True)
    finally:
        learners.close()
        ray.kill(engine)
        time.sleep(3)  # the GPU's memory comes back after the processes have ended

    def median(name: str) -> float:
        return statistics.median(push.get(name, 0.0) for push in pushes)

    row = {
        "scheme": scheme,
        "pushes": len(pushes),
        "p50_ms": median("total_ms"),
        "min_ms": min(push["total_ms"] for push in pushes),
        "max_ms": max(push["total_ms"] for push in pushes),
        "first_ms": first["total_ms"],
        "connect_ms": first["sync/connect_ms"],
        "quantize_only_ms": quantize,
        "gather_only_ms": gather,
        "gather_ms": median("sync/gather_ms"),
        "send_ms": median("sync/send_ms"),
        "load_ms": median("sync/load_ms"),
        "verify_ms": median("sync/verify_ms"),
        "finish_ms": median("sync/finish_ms"),
        "bytes": pushes[-1]["sync/bytes"],
        "tensors": pushes[-1]["sync/tensors"],
        "buckets": pushes[-1]["sync/buckets"],
        "checksum_ok": min(push["sync/checksum_ok"] for push in [*pushes, last]),
        "published": last["published"],
        "learner_peak_mb": max(push.get("learner_peak_mb", 0.0) for push in pushes),
        "learner_growth_mb": pushes[-1].get("learner_allocated_mb", 0.0) - pushes[0].get("learner_allocated_mb", 0.0),
        "engine_growth_mb": (memory[1]["allocated"] - memory[0]["allocated"]) / 2**20,
        "engine_peak_mb": (memory[1]["peak"] - memory[1]["allocated"]) / 2**20,
        "decode_ms": decode,
    }
    print("  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)
    return row


def measure_openrlhf(args, directory: str) -> dict:
    share = 0.5 if args.transport == "ipc" else 1
    engine = sync.start_openrlhf_engine(directory, gpus=share)
    learner = ray.remote(sync.Learner).options(num_gpus=share, num_cpus=0).remote(args.shape, args.layers, "bf16")
    try:
        if args.transport == "nccl":
            ray.get(learner.join_openrlhf.remote([engine]))
        count = 1 + max(3, args.pushes // 4)
        pushes = [ray.get(learner.push_openrlhf.remote([engine], args.transport)) for _ in range(count)][1:]
    finally:
        ray.kill(learner)
        ray.kill(engine)
        time.sleep(3)
    row = {"scheme": "bf16, OpenRLHF's own push", "pushes": len(pushes), "p50_ms": statistics.median(pushes)}
    row |= {"min_ms": min(pushes), "all_ms": pushes}
    print("  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)
    return row


def versions(*packages: str) -> dict[str, str]:
    """Installed versions, and Python's. vLLM's build for CPUs is a package of another name."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = version(f"{name}-cpu")
    return found


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
