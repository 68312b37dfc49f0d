#!/usr/bin/env bash
# Qwen2.5-Math-1.5B on one GPU of 24 GB: learner and engine take turns (sleep), weights are handed over in GPU memory (ipc),
# master weights and optimizer state are in main memory (about 35 GiB). ARM, environment variables and flags: scripts/lib/recipe.sh
# Smaller than the paper: the model's own 4,096 positions, 128 prompts x 8 samples, still 8 updates a rollout.
export QARL_NODES=1 QARL_GPUS_PER_NODE=1
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"

# The paper's bands belong to 16,384 tokens: widened for responses of about 1,000.
short=()
if [ "$ARM" = qarl ]; then short=(--preset tbpo_short --preset_length 1000); fi
train qwen2.5-math-1.5b-1gpu Qwen/Qwen2.5-Math-1.5B grpo_tis 1 24 \
    --data.max_len 4096 --rollout.max_new_tokens 3072 --train.max_tokens_per_gpu 4096 \
    --rollout.batch_size 128 --train.batch_size 128 \
    --ds.zero_stage 2 --ds.adam_offload --quant.cache packed --sync.transport ipc \
    --vllm.gpu_memory_utilization 0.5 ${short[@]+"${short[@]}"} "$@"
