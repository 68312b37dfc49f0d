#!/usr/bin/env bash
# Qwen3-8B, the paper's setting on 8 GPUs of 80 GB. ARM, environment variables and flags: scripts/lib/recipe.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"

# Weights in shards leave the engines room for keys and values. A learner with GPUs of its own need not gather them for every micro-batch.
if [ "$place" = apart ]; then zero=2; else zero=3; fi
train qwen3-8b Qwen/Qwen3-8B grpo_tis 1 80 \
    --ds.zero_stage "$zero" --vllm.gpu_memory_utilization 0.75 "$@"
