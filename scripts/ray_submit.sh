#!/usr/bin/env bash
# A recipe as a job on a Ray cluster that runs already, on one node or several:
#   on the first node:   .venv/bin/ray start --head --port 6379 --dashboard-host 0.0.0.0
#   on every other:      .venv/bin/ray start --address FIRST:6379
#   anywhere:            ARM=qarl QARL_NODES=2 bash scripts/ray_submit.sh http://FIRST:8265 train_qwen3_30b_a3b.sh [flags of train_qarl]
# This directory, its .venv, the data and the run directory have to be at the same path on every node (shared storage); so has the
# Hugging Face cache where a recipe sets --model.max_positions. What the environment variables of scripts/lib/recipe.sh say here
# holds in the job; tokens and keys stay out of it, as every user of the cluster can read a job's command: set those on the nodes.
# QARL_PRINT_COMMAND=1 prints the command and stops.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/common.sh"
if [ $# -lt 2 ] || [ ! -f "$root/scripts/$2" ]; then
    echo "usage: [ARM=qarl] [QARL_NODES=N] scripts/ray_submit.sh DASHBOARD train_MODEL.sh [flags]; recipes: $(cd "$root/scripts" && echo train_*.sh)" >&2
    exit 2
fi
address=$1 recipe=$2
shift 2
variables=()
for name in ARM ${!QARL_@} ${!HF_@} ${!NCCL_@}; do
    case $name in *TOKEN* | *KEY* | QARL_PRINT_COMMAND) continue ;; esac
    if [ -n "${!name:-}" ]; then variables+=("$name=${!name}"); fi
done
command=("$venv/bin/ray" job submit --address "$address" --
    env ${variables[@]+"${variables[@]}"} bash "$root/scripts/$recipe" "$@")
if [ -n "${QARL_PRINT_COMMAND:-}" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
# Asked first: of a cluster that is not there `ray job submit` makes five tracebacks. The last line is the error, others Ray's log.
if ! said=$("$venv/bin/python" - "$address" 2>&1 <<'END'
import sys

from ray.job_submission import JobSubmissionClient

try:
    JobSubmissionClient(sys.argv[1])
except Exception as error:
    sys.exit(f"{sys.argv[1]}: {' '.join(str(error).split()).rstrip('.')}; give the dashboard of a running Ray cluster, http://HOST:8265")
END
); then
    say "${said##*$'\n'}"
    exit 1
fi
exec "${command[@]}"
