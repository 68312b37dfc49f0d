"""``python -m qarl_openrlhf.cli.bench_kernels [family ...]``: kernel times and targets, beside the library's, on this card."""

import argparse
import importlib
import json
import platform
from pathlib import Path

import torch
import triton

from qarl_openrlhf.bench.shapes import MODELS
from qarl_openrlhf.kernels import dispatch

FAMILIES = ("quantize", "activation", "forward", "small", "grouped", "logits", "layer")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench_kernels", description=__doc__)
    parser.add_argument("family", nargs="*", default=[], help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", default="benchmarks/results", help="directory for kernels_<family>_<card>.json")
    args = parser.parse_args(argv)
    unknown = set(args.family) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown family {', '.join(sorted(unknown))}: choose from {', '.join(FAMILIES)}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these are GPU kernels (tests run them on a CPU with TRITON_INTERPRET=1)")
    torch.manual_seed(0)
    for family in args.family or FAMILIES:
        print(f"== {family}", flush=True)
        rows = []
        for row in importlib.import_module(f"qarl_openrlhf.bench.{family}").run(args.models):
            rows.append(row)
            print("  ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
        _write(Path(args.out), family, args.models, rows)
    print(f"chosen by --quant.kernel auto:\n{dispatch.kernel_choices()}", flush=True)


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write(directory: Path, family: str, models: list[str], rows: list[dict]) -> None:
    card = torch.cuda.get_device_name()
    chosen = "" if models == list(MODELS) else f" --models {' '.join(models)}"
    record = {
        "command": f"python -m qarl_openrlhf.cli.bench_kernels {family}{chosen}",
        "card": card,
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "rows": [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
    }
    directory.mkdir(parents=True, exist_ok=True)
    short = "h200" if "H200" in card else "h100" if "H100" in card else card.replace(" ", "-").lower()
    path = directory / f"kernels_{family}_{short}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    main()
