#!/usr/bin/env bash
# Qwen2.5-Math-1.5B, the paper's setting on 8 GPUs of 80 GB. ARM, environment variables and flags: scripts/lib/recipe.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"

# Not in the paper: the model has 4,096 positions, prompt and response 18,432. --model.* rewrites config.json for learner, engines
# and exports alike; the base of its rotary positions, 10,000, is raised by about the same factor.
train qwen2.5-math-1.5b Qwen/Qwen2.5-Math-1.5B grpo_tis 1 80 \
    --model.max_positions 18432 --model.rope_theta 40000 \
    --ds.zero_stage 2 --vllm.gpu_memory_utilization 0.75 "$@"
