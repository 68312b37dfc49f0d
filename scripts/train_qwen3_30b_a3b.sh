#!/usr/bin/env bash
# Qwen3-30B-A3B, the paper's setting on 8 GPUs of 80 GB; master weights and optimizer state are in main memory (about 490 GiB a node;
# ARM=bf16 655). ARM, environment variables and flags: scripts/lib/recipe.sh
# QARL_OFFLOAD=0 on GPUs of 141 GB: they are in main memory only while the engines sample (about 395 GiB a node; ARM=bf16 560).
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/recipe.sh"

# TP 2: an expert has 768 intermediate features, of which a rank must hold whole groups of 128; and the BF16 arm's engine would
# leave one card no room for its KV cache.
offload=${QARL_OFFLOAD:-1}
need QARL_OFFLOAD "$offload" "0|1" "0 or 1"
states=(--ds.adam_offload) card=80
if [ "$offload" = 0 ]; then states=() card=139; fi
train qwen3-30b-a3b Qwen/Qwen3-30B-A3B gspo 2 "$card" \
    --ds.zero_stage 3 ${states[@]+"${states[@]}"} --vllm.gpu_memory_utilization 0.6 "$@"
