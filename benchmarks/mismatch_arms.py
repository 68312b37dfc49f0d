"""The table of ``benchmarks/mismatch_arms.sh``: mean |delta log p| by arm at the first and the last step, and the limits it
must keep. Exits with 1 if one is broken.

    python benchmarks/mismatch_arms.py [RESULTS_DIR]
"""

import json
import sys
from pathlib import Path

ARMS = ("bf16", "w4a16:g64:rollout", "w4a16:g64")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(directory: Path) -> int:
    runs = {arm: read(directory / f"mismatch_{arm.replace(':', '-')}.jsonl") for arm in ARMS}
    print("| arm | steps | tokens a step | mean abs delta log p, first step | last step | codes changed in all |")
    print("|---|---|---|---|---|---|")
    ends = {}
    for arm, steps in runs.items():
        ends[arm] = [steps[i]["mismatch/abs_logp_mean"] for i in (0, -1)]
        changed = steps[-1].get("sync/changed_code_frac_total")
        tokens = sum(step["rollout/tokens"] for step in steps) / len(steps)
        codes = "-" if changed is None else f"{changed:.3%}"
        print(f"| {arm} | {len(steps)} | {tokens:.0f} | {ends[arm][0]:.4f} | {ends[arm][1]:.4f} | {codes} |")
    bf16, rollout, qarl = (ends[arm] for arm in ARMS)
    limits = {
        "QaRL at most 0.1": all(q <= 0.1 for q in qarl),
        "QaRL at most an eighth of rollout-only": all(q <= r / 8 for q, r in zip(qarl, rollout, strict=True)),
        "QaRL at most 1.6 x BF16": all(q <= 1.6 * b for q, b in zip(qarl, bf16, strict=True)),
        "over 0.1 % of the codes changed": runs["w4a16:g64"][-1].get("sync/changed_code_frac_total", 0) > 1e-3,
    }
    for limit, kept in limits.items():
        print(f"{'holds' if kept else 'BROKEN'}: {limit}")
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results")))
