#!/usr/bin/env bash
# Sets the environment up and runs the tests; prints the ten slowest. Arguments go to pytest:
#   scripts/test.sh                       everything but the long matrix
#   scripts/test.sh -m slow               the long matrix
#   scripts/test.sh tests/quant -x        part of it
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/common.sh"
"$root/scripts/setup_env.sh"
unset PYTHONPATH
cd "$root"
"$venv/bin/python" -m pytest -q --durations=10 -m "not slow" "$@"
