#!/usr/bin/env bash
# A training step by phase, every scheme beside BF16, on one GPU. Results: step_<shape>_<card>.json
#   bash benchmarks/gpu/step.sh [SHAPE ...]          8b 30b-a3b (also 1.5b 7b)
# Each part ends within 9 minutes and goes on where it ended when the script is called again.
# env: QARL_STEP_PARTS="engine learner"  QARL_STEP_SECONDS=590 (limit of a part)  QARL_STEP_FLAGS="--response 1024" (more flags)
set -uo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
known "1.5b 7b 8b 30b-a3b" "$@"
[ $# -gt 0 ] || set -- 8b 30b-a3b
seconds=${QARL_STEP_SECONDS:-590}
need QARL_STEP_SECONDS "$seconds" "$count" "a whole number of seconds"
parts=${QARL_STEP_PARTS:-engine learner}
known "engine learner" $parts
read -r -a more <<<"${QARL_STEP_FLAGS:-}"
# Start-up of a piece, and the tables, come out of the limit.
minutes=$(awk "BEGIN { print ($seconds - 50) / 60 }")
cd "$root"
for shape in "$@"; do
    # Log-probs in chunks: with all logits of 22,528 tokens at once, 80 GB hold no three depths of the larger shapes.
    step=("$python" -m qarl_openrlhf.cli.bench_step --shape "$shape" --minutes "$minutes" --out "$out"
        --actor.logprob_chunk 2048 ${more[@]+"${more[@]}"})
    for part in $parts; do
        case $part in
            engine) piece "$shape rollout and push" "$seconds" "${step[@]}" --only rollout push ;;
            learner) piece "$shape learner" "$seconds" "${step[@]}" --only learner ;;
        esac
    done
done
finish
