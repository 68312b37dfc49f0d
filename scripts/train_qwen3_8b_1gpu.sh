#!/usr/bin/env bash
# Qwen3-8B on one GPU of 80 GB: learner and engine take turns (sleep), weights are handed over in GPU memory (ipc), master weights
# and optimizer state are in main memory (about 100 GiB). ARM, environment variables and flags: scripts/lib/recipe.sh
# Smaller than the paper: responses of 7,168 tokens, 128 prompts x 8 samples, still 8 updates a rollout.
export QARL_NODES=1 QARL_GPUS_PER_NODE=1
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"

# The paper's bands belong to 16,384 tokens: widened for responses of about 4,000.
short=()
if [ "$ARM" = qarl ]; then short=(--preset tbpo_short --preset_length 4000); fi
train qwen3-8b-1gpu Qwen/Qwen3-8B grpo_tis 1 80 \
    --data.max_len 9216 --rollout.max_new_tokens 7168 --train.max_tokens_per_gpu 9216 \
    --rollout.batch_size 128 --train.batch_size 128 \
    --ds.zero_stage 2 --ds.adam_offload --quant.cache packed --sync.transport ipc \
    --vllm.gpu_memory_utilization 0.5 ${short[@]+"${short[@]}"} "$@"
