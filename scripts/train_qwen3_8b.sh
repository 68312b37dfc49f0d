#!/usr/bin/env bash
# Qwen3-8B, the paper's setting on 8 GPUs of 80 GB. ARM, environment variables and flags: scripts/lib/recipe.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"

train qwen3-8b Qwen/Qwen3-8B grpo_tis 1 80 \
    --ds.zero_stage 3 --vllm.gpu_memory_utilization 0.75 "$@"
