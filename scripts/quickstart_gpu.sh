#!/usr/bin/env bash
# scripts/quickstart.sh on one NVIDIA GPU, colocated: vLLM's own W4A16 kernels roll out, our Triton kernels train, the packed
# weights are handed over in GPU memory (CUDA IPC). Same arguments and environment variables; 32 prompts x 8 a step.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/common.sh"
QARL_QUICKSTART_DEVICE=cuda exec bash "$root/scripts/quickstart.sh" "$@"
