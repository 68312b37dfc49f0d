#!/usr/bin/env bash
# Sets the environment up and runs the tests; prints the ten slowest. Arguments go to pytest:
#   scripts/test.sh                       everything but the long matrix
#   scripts/test.sh -m slow               the long matrix
#   scripts/test.sh tests/quant -x        part of it
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
"$root/scripts/setup_env.sh"
unset PYTHONPATH
"${QARL_VENV:-$root/.venv}/bin/python" -m pytest -q --durations=10 -m "not slow" "$@"
