#!/usr/bin/env bash
# Qwen3-8B on one GPU of 80 GB: learner and engine take turns (sleep), weights are handed over in GPU memory (ipc), master weights
# and optimizer state are in main memory (about 125 GiB; ARM=bf16 135). ARM, environment variables and flags: scripts/lib/recipe.sh
# On a GPU of 141 GB  QARL_OFFLOAD=0: they stay on it, and main memory is not needed; QARL_OFFLOAD=asleep: they leave it while the
# engine samples (about 105 GiB of main memory; ARM=bf16 115), which then samples several times as many responses at a time.
# Smaller than the paper: responses of 7,168 tokens, 128 prompts x 8 samples, still 8 updates a rollout.
export QARL_NODES=1 QARL_GPUS_PER_NODE=1
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"
offload=${QARL_OFFLOAD:-1}
need QARL_OFFLOAD "$offload" "0|1|asleep" "0, 1 or asleep"

# ZeRO-3 on one GPU: it needs two bytes a parameter less than ZeRO-2 in main memory, and steps through a tenth of the model at a time.
# Micro-batches as large as fit: DeepSpeed's own work, and gradients on their way to main memory, are the same for small ones.
case $offload in
    1) states=(--ds.adam_offload --vllm.gpu_memory_utilization 0.6 --train.max_tokens_per_gpu 22528) card=80 ;;
    asleep) states=(--vllm.gpu_memory_utilization 0.75 --train.max_tokens_per_gpu 18432) card=139 ;;
    0)
        turns=(--train.colocate_all --vllm.enable_sleep)
        states=(--vllm.gpu_memory_utilization 0.2 --train.max_tokens_per_gpu 18432) card=139
        ;;
esac
# The paper's bands belong to 16,384 tokens: widened for responses of about 4,000.
short=()
if [ "$ARM" = qarl ]; then short=(--preset tbpo_short --preset_length 4000); fi
train qwen3-8b-1gpu Qwen/Qwen3-8B grpo_tis 1 "$card" \
    --data.max_len 9216 --rollout.max_new_tokens 7168 \
    --rollout.batch_size 128 --train.batch_size 128 \
    --ds.zero_stage 3 --quant.cache packed --sync.transport ipc \
    "${states[@]}" ${short[@]+"${short[@]}"} "$@"
