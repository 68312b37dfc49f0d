#!/usr/bin/env bash
# Do the recipes in scripts/ run on this machine's GPUs? Random weights of the model's shape in a few layers, short responses,
# two rollouts of two optimizer steps each, in the paper's three arms: starts, publishes, verifies, steps; the qarl arm also saves and
# resumes. Everything else is the recipe's own. The table at the end: memory beside the dry run's estimate, times, what failed.
#   bash benchmarks/gpu/recipes.sh [RECIPE ...]      qwen3_8b qwen3_30b_a3b; on one GPU: qwen3_8b_1gpu
# env: QARL_RECIPES_GPUS (default: all visible)  QARL_RECIPES_LAYERS=4  QARL_RECIPES_ARMS="qarl bf16 rollout"
#      QARL_RECIPES_PLACES="colocated apart"  QARL_RECIPES_SECONDS=400 (limit of a run)  QARL_RECIPES_DIR=runs/recipes
#      QARL_RECIPES_RESUME=1 (0: the qarl arm saves no checkpoint; one of all of the 8B's layers is about 90 GB)
#      QARL_RECIPES_FLAGS="--quant.scheme fp8" (more flags, every run)  QARL_VENV=.venv
set -uo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
known "qwen3_8b qwen3_30b_a3b qwen3_8b_1gpu" "$@"
gpus=${QARL_RECIPES_GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
if [ $# -eq 0 ]; then
    if [ "$gpus" = 1 ]; then set -- qwen3_8b_1gpu; else set -- qwen3_8b qwen3_30b_a3b; fi
fi
layers=${QARL_RECIPES_LAYERS:-4} seconds=${QARL_RECIPES_SECONDS:-400}
arms=${QARL_RECIPES_ARMS:-qarl bf16 rollout} places=${QARL_RECIPES_PLACES:-colocated apart} runs=${QARL_RECIPES_DIR:-$root/runs/recipes}
resume=${QARL_RECIPES_RESUME:-1}
need QARL_RECIPES_GPUS "$gpus" "$count" "a whole number, 1 or more"
need QARL_RECIPES_LAYERS "$layers" "$count" "a whole number, 1 or more"
need QARL_RECIPES_SECONDS "$seconds" "$count" "a whole number of seconds"
need QARL_RECIPES_RESUME "$resume" "0|1" "0 or 1"
known "qarl bf16 rollout" $arms
known "colocated apart" $places
[[ $runs == /* ]] || runs=$PWD/$runs
read -r -a more <<<"${QARL_RECIPES_FLAGS:-}"
cd "$root"

# A fixed KV cache: what else runs on the machine does not change it. Twelve graphs instead of 67: a shorter start.
graphs='{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 16, 32, 64, 128]}'
small=(--rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --train.batch_size 64
    --data.max_len 1024 --rollout.max_new_tokens 512 --train.max_tokens_per_gpu 8192 --rollout.max_tokens_per_gpu 8192
    --vllm.gpu_memory_utilization 0.05 --vllm.engine_args '{"kv_cache_memory_bytes": 2147483648, "compilation_config": '"$graphs"'}')
remove() { [ -n "${QARL_DRY_RUN:-}" ] || rm -rf "$@"; } # they are large
for recipe in "$@"; do
    # apart: two halves, of which one has whole engines of the recipe's TP.
    case $recipe in
        qwen3_8b) shape=8b apart=2 ;;
        qwen3_8b_1gpu) shape=8b apart=0 ;;
        qwen3_30b_a3b) shape=30b-a3b apart=4 ;;
    esac
    model=$runs/models/$shape-$layers
    piece "$recipe: random weights" 300 "$python" benchmarks/random_model.py "$shape" "$model" --layers "$layers"
    for place in $places; do
        if [ "$place" = apart ] && ((!apart || gpus % apart)); then
            [ "$apart" = 0 ] || say "$recipe apart: left out, it takes a multiple of $apart GPUs"
            continue
        fi
        for arm in $arms; do
            out=$runs/$recipe-$place-$arm
            run=(env ARM="$arm" QARL_PLACE="$place" QARL_GPUS_PER_NODE="$gpus" QARL_RUN_DIR="$out" QARL_DATA="$model/prompts.jsonl"
                QARL_REWARD="$root/benchmarks/mismatch_reward.py" bash "scripts/train_$recipe.sh" --actor.model_name_or_path "$model" "${small[@]}")
            remove "$out/checkpoints" "$out/model"
            if [ "$arm $resume" = "qarl 1" ]; then
                piece "$recipe $place $arm" "$seconds" "${run[@]}" --data.max_samples 32 --ckpt.save_steps 2 --ckpt.max_num 1 ${more[@]+"${more[@]}"}
                if [ -e "$out/checkpoints/_actor/latest" ] || [ -n "${QARL_DRY_RUN:-}" ]; then # without, a run would start anew and call itself resumed
                    piece "$recipe $place $arm, resumed" "$seconds" "${run[@]}" --data.max_samples 48 --ckpt.save_steps 100 --ckpt.load_enable \
                        ${more[@]+"${more[@]}"}
                else
                    failed+=("$recipe $place $arm, resumed")
                fi
            else
                piece "$recipe $place $arm" "$seconds" "${run[@]}" --data.max_samples 32 --ckpt.save_steps 100 ${more[@]+"${more[@]}"}
            fi
            remove "$out/checkpoints" "$out/model"
        done
    done
done
piece table 60 "$python" benchmarks/recipes_table.py "$runs"
finish
