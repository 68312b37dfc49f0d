#!/usr/bin/env bash
# Qwen2.5-Math-7B, the paper's setting on 8 GPUs of 80 GB. ARM, environment variables and flags: scripts/lib/recipe.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"

# Weights in shards leave the engines room for keys and values. A learner with GPUs of its own need not gather them for every micro-batch.
if [ "$place" = apart ]; then zero=2; else zero=3; fi
# Not in the paper: the model has 4,096 positions, prompt and response 18,432; see train_qwen2.5_math_1.5b.sh.
train qwen2.5-math-7b Qwen/Qwen2.5-Math-7B grpo_tis 1 80 \
    --model.max_positions 18432 --model.rope_theta 40000 \
    --ds.zero_stage "$zero" --vllm.gpu_memory_utilization 0.75 "$@"
