"""The runs of `benchmarks/gpu/recipes.sh` as a table: `python benchmarks/recipes_table.py runs/recipes`.

Memory: what the learner's tensors took at most on any GPU (PyTorch's allocator, without CUDA's own context), beside the dry run's
estimate of the same. Times: medians of the steps after the first.
"""

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

from qarl_openrlhf.planning.architecture import meta_model
from qarl_openrlhf.planning.memory import learner_tensors
from qarl_openrlhf.planning.model_shape import ModelShape
from qarl_openrlhf.planning.parts import GIB
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.scheme import QuantScheme
from qarl_openrlhf.report import load_run

COLUMNS = (
    "run", "steps", "checksums", "probe, nats", "mismatch, nats", "peak, GiB", "estimated", "peak / estimated", "rollout, s",
    "training, s", "publish, s", "step, s",
)  # fmt: skip


def nested(flags: dict) -> SimpleNamespace:
    """{"a.b": 1} -> namespace.a.b; lists that JSON made of tuples stay lists."""
    top = SimpleNamespace()
    for name, value in flags.items():
        *groups, last = name.split(".")
        at = top
        for group in groups:
            if not hasattr(at, group):
                setattr(at, group, SimpleNamespace())
            at = getattr(at, group)
        setattr(at, last, value)
    return top


def estimated(flags: dict) -> float:
    """GiB of the learner's tensors at their peak."""
    from transformers import AutoConfig

    args = nested(flags)
    config = AutoConfig.from_pretrained(args.actor.model_name_or_path)
    model = meta_model(config, args.actor.model_name_or_path)
    report = convert_model(model, QuantScheme.parse(args.quant.scheme), tp=args.vllm.tensor_parallel_size)
    return learner_tensors(args, ModelShape.of(model, report, config)) / GIB


def row_of(directory: Path) -> list[str]:
    flags = json.loads((directory / "run.json").read_text(encoding="utf-8"))["flags"]
    rows = load_run(directory).rows if (directory / "metrics.jsonl").is_file() else []
    if not rows:
        return [directory.name, "0", *["-"] * (len(COLUMNS) - 2)]

    def of(name: str, which=max, later: bool = False) -> float:
        found = [row[name] for row in rows if row.get(name) is not None]
        return which(found[1:] if later and len(found) > 1 else found) if found else float("nan")

    peak, wanted = of("memory/learner_peak_gib"), estimated(flags)
    times = [of(f"timing/{name}", statistics.median, True) for name in ("generation", "train", "publish", "step_total")]
    return [
        directory.name, str(len(rows)), f"{of('sync/checksum_ok', min):.0f}", f"{of('sync/probe_abs_logp'):.4f}",
        f"{of('mismatch/abs_logp_mean'):.4f}", f"{peak:.1f}", f"{wanted:.1f}", f"{peak / wanted:.2f}", *(f"{t:.1f}" for t in times),
    ]  # fmt: skip


def main(root: Path) -> None:
    runs = sorted(path.parent for path in root.glob("*/run.json"))
    if not runs:
        raise SystemExit(f"recipes_table: error: no run in {root}")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for directory in runs:
        print("| " + " | ".join(row_of(directory)) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
