#!/usr/bin/env bash
# On one GPU: every kernel beside the library's, L2 flushed between repeats. Results: kernels_<family>_<card>.json
#   bash benchmarks/gpu/kernels.sh [FAMILY ...]      quantize activation forward small grouped logits layer
set -uo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
families="quantize activation forward small grouped logits layer"
known "$families" "$@"
cd "$root"
for family in $families; do
    wants "$family" "$@" || continue
    piece "$family" 240 "$python" -m qarl_openrlhf.cli.bench_kernels "$family" --out "$out"
done
finish
