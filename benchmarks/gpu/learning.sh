#!/usr/bin/env bash
# Does QaRL learn? One GPU or several: arms x seeds on sums that a policy writes out step by step, learner and engine colocated. The policy: a small
# Qwen3 made from nothing, or a model that is taught such sums first (QARL_LEARNING_BASE).
#   bash benchmarks/gpu/learning.sh [GROUP ...]
#   main        BF16, quantized rollout only and QaRL W4A16, each with TBPO and with GRPO+TIS; the first seed. The other seeds: BF16
#               with GRPO+TIS, quantized rollout only with both, QaRL with TBPO
#   objectives  QaRL W4A16 with the other six objectives; the first seed
#   schemes     fp8, w8a8 and w4a8 (QARL_LEARNING_SCHEMES) with TBPO; the first seed
#   grid        every scheme of QARL_LEARNING_SCHEMES with every objective of QARL_LEARNING_ARMS, every seed
#   policy      only the policy that all of them start from
# Stopped or out of time, the same command goes on from the last checkpoints. Tables and pictures: runs/learning/summary.md
# Many runs on one GPU are faster under CUDA MPS (nvidia-cuda-mps-control -d): fourteen took 10 to 11 s a step on an H200, and some 6.5 GB of main memory each.
# env: QARL_LEARNING_SECONDS=590 (limit of this call)  QARL_LEARNING_JOBS=3 (runs side by side on each GPU of CUDA_VISIBLE_DEVICES)
#      QARL_LEARNING_STEPS=60  QARL_LEARNING_LR=2e-5  QARL_LEARNING_TERMS=16 (length of a problem, about 12 tokens a term)
#      QARL_LEARNING_PROMPTS=16 (a step; 16 responses each, eight updates)  QARL_LEARNING_ARMS=tbpo,grpo_tis (of main and grid)
#      QARL_LEARNING_SCHEMES=fp8,w8a8,w4a8 (of schemes and grid)  QARL_LEARNING_SEEDS=0,1,2  QARL_LEARNING_BAND=16 (--objective.band_scale)  QARL_LEARNING_DIR=runs/learning
#      QARL_LEARNING_BASE=runs/inputs/SmolLM2-135M-Instruct (its group: QARL_LEARNING_GROUP=64)  QARL_LEARNING_BOTH=1 (small_qwen3 --both)
#      QARL_LEARNING_OWN=1 (two policies: BF16 and 8-bit arms start from one taught in BF16, 4-bit arms from one taught through its 4-bit weights)
#      QARL_LEARNING_START=0.3 (share solved at which a policy is taught enough)  QARL_LEARNING_SLIPS (share of the partial
#      results that it is taught wrong; default: so many that it solves at most 0.5 of its problems as sampled, and most greedily)
#      QARL_LEARNING_FLAGS="--actor.optim adam" (more flags, every run)  QARL_LEARNING_DEVICE=cuda (cpu: to try the commands)
set -uo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
known "main objectives schemes grid policy" "$@"
[ $# -gt 0 ] || set -- main objectives schemes
seconds=${QARL_LEARNING_SECONDS:-590} jobs=${QARL_LEARNING_JOBS:-3} steps=${QARL_LEARNING_STEPS:-60}
terms=${QARL_LEARNING_TERMS:-16} start=${QARL_LEARNING_START:-0.3} seeds=${QARL_LEARNING_SEEDS:-0,1,2} device=${QARL_LEARNING_DEVICE:-cuda}
lr=${QARL_LEARNING_LR:-2e-5} band=${QARL_LEARNING_BAND:-16} runs=${QARL_LEARNING_DIR:-$root/runs/learning}
base=${QARL_LEARNING_BASE:-} group=${QARL_LEARNING_GROUP:-128} prompts=${QARL_LEARNING_PROMPTS:-16} both=${QARL_LEARNING_BOTH:-1} arms=${QARL_LEARNING_ARMS:-tbpo,grpo_tis}
own=${QARL_LEARNING_OWN:-0} schemes=${QARL_LEARNING_SCHEMES:-fp8,w8a8,w4a8}
[[ $runs == /* ]] || runs=$PWD/$runs
[[ -z $base || $base == /* ]] || base=$PWD/$base
for name in SECONDS JOBS STEPS TERMS PROMPTS; do
    variable=QARL_LEARNING_$name lower=${name,,}
    need "$variable" "${!lower}" "$count" "a whole number, 1 or more"
done
slips=${QARL_LEARNING_SLIPS:-$(awk "BEGIN { printf \"%.3f\", 1 - 0.5 ^ (1 / ($terms > 1 ? $terms - 1 : 1)) }")}
need QARL_LEARNING_BOTH "$both" "$count" "a whole number of steps, 1 or more"
need QARL_LEARNING_OWN "$own" "0|1" "0 or 1"
need QARL_LEARNING_GROUP "$group" "32|64|128" "32, 64 or 128"
need QARL_LEARNING_SCHEMES "$schemes" "[a-z0-9:]+(,[a-z0-9:]+)*" "schemes with commas between them, e.g. fp8,w4a16:g32"
need QARL_LEARNING_SEEDS "$seeds" "[0-9]+(,[0-9]+)*" "whole numbers with commas between them, e.g. 0,1"
need QARL_LEARNING_DEVICE "$device" "cuda|cpu" "cuda or cpu"
read -r -a more <<<"${QARL_LEARNING_FLAGS:-}"
cd "$root"

IFS=, read -r -a cards <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}"
gpus=${#cards[@]}
[ "$gpus" -gt 0 ] || gpus=1

# All arms start from one policy. A small one made from nothing solves as many sums in 4 bits as in BF16. SmolLM2's weights, taught
# in BF16, solve 0.55 of them and rounded to 4 bits 0.002: it is taught in both, QARL_LEARNING_BOTH steps in BF16 for each in 4 bits.
policy=$root/runs/inputs/sums-$terms${base:+-$(basename "$base")}
w4a16=w4a16
[ "$group" = 128 ] || w4a16=w4a16:g$group
size=(--layers 8 --hidden 512 --intermediate 1536 --lr 5e-4 --steps 6000 --check_every 50)
[ -z "$base" ] || size=(--base "$base" --lr 5e-5 --steps 3000 --check_every 100)
form=() four_bit=$policy-4bit
if [ "$own" = 0 ]; then
    if [ -n "$base" ]; then policy=$policy-both$both form=(--scheme "$w4a16" --both "$both"); fi
    four_bit=$policy
fi
length=$((12 * terms + 64))
placement=()
if [ "$device" = cuda ]; then
    # Runs side by side share the GPU: each engine takes a fixed KV cache and does not measure free memory, which the others
    # change. No compilation and twelve graphs: half a minute less to start.
    graphs='{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512]}'
    engine='{"max_num_seqs": 512, "kv_cache_memory_bytes": 1610612736, "compilation_config": '"$graphs"'}'
    placement=(--train.colocate_all --vllm.gpu_memory_utilization 0.05 --vllm.engine_args "$engine" --ds.packing_samples --actor.logprob_chunk 2048
        --train.dynamic_batch_enable --train.max_tokens_per_gpu 8192 --rollout.max_tokens_per_gpu 8192)
fi
# Eight updates of an eighth of the responses each, as many a rollout as in the paper.
batch=$((prompts * 2))
shared=(--device "$device" ${placement[@]+"${placement[@]}"} --objective.band_scale "$band"
    --reward.remote_url "$root/qarl_openrlhf/rewards/reasoning_gym.py"
    --data.input_key input --data.label_key label --data.max_samples $((steps * prompts))
    --data.max_len $((2 * length)) --rollout.max_new_tokens "$length"
    --rollout.batch_size "$prompts" --rollout.n_samples_per_prompt 16 --rollout.micro_batch_size "$batch"
    --train.batch_size "$batch" --train.micro_batch_size "$batch" --algo.advantage.estimator group_norm
    --eval.steps 10 --eval.n_samples_per_prompt 2 --eval.temperature 1.0 --ckpt.best_metric_key none
    --actor.adam.lr "$lr" --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --ds.zero_stage 2
    --actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1
    --ckpt.save_steps 10 --ckpt.max_num 1 ${more[@]+"${more[@]}"})

# One line a job: seed, scheme, arm. Main first, seed by seed, so that a first whole comparison is there early.
plan() {
    local group seed scheme arm
    for group in "$@"; do
        case $group in
            main)
                for seed in ${seeds//,/ }; do
                    for arm in ${arms//,/ }; do
                        for scheme in bf16 "$w4a16:rollout" "$w4a16"; do
                            if [ "$seed" != "${seeds%%,*}" ] && [[ "$scheme $arm" == "bf16 tbpo" || "$scheme $arm" == "$w4a16 grpo_tis" ]]; then
                                continue
                            fi
                            echo "$seed $scheme $arm"
                        done
                    done
                done
                ;;
            objectives) for arm in gspo mis_gspo dual_clip sapo positive_grpo onpolicy_grpo; do echo "${seeds%%,*} $w4a16 $arm"; done ;;
            grid)
                for seed in ${seeds//,/ }; do
                    for arm in ${arms//,/ }; do
                        for scheme in ${schemes//,/ }; do echo "$seed $scheme $arm"; done
                    done
                done
                ;;
            schemes) for scheme in ${schemes//,/ }; do echo "${seeds%%,*} $scheme tbpo"; done ;;
        esac
    done
}

# teach NAME GPU DIRECTORY [FLAG ...]
teach() {
    local name=$1 gpu=$2 directory=$3
    shift 3
    piece "$name" "$seconds" env ${gpu:+CUDA_VISIBLE_DEVICES="$gpu"} "$python" -m qarl_openrlhf.data.small_qwen3 "$directory" \
        --device "$device" --style steps --config "min_terms=$terms" "max_terms=$terms" min_digits=2 max_digits=2 \
        --prompts 4096 --heldout 256 "${size[@]}" "$@" --slips "$slips" --stop_at "$start"
    [ ${#failed[@]} -eq 0 ]
}
deadline=$(($(date +%s) + seconds))
taught=()
if [ "$own" = 1 ]; then # both at once
    teach "the 4-bit policy" "${cards[gpus - 1]:-}" "$four_bit" --scheme "$w4a16" &
    taught=($!)
fi
teach "the policy" "${cards[0]:-}" "$policy" ${form[@]+"${form[@]}"} || failed=("the policy")
[ ${#taught[@]} -eq 0 ] || wait "${taught[@]}" || failed+=("the 4-bit policy")
if [ ${#failed[@]} -gt 0 ] || [ "$*" = policy ]; then finish; fi
# Each job has a directory of its own: two ablations do not share one. A place of xargs stays on one GPU.
job='read -r -a cards <<<"$CARDS"; [ "$GPUS" = 1 ] || export CUDA_VISIBLE_DEVICES=${cards[PLACE % GPUS]}
    read -r seed scheme arm <<<"$1"; name=seed$seed-${scheme//:/-}-$arm; shift
    policy=$POLICY
    [[ $scheme != w4* ]] || policy=$FOUR_BIT
    left=$((DEADLINE - $(date +%s)))
    if [ "$left" -lt 60 ]; then echo "no time left for $name"; exit 1; fi
    exec timeout -k 20 "$left" "$@" --actor.model_name_or_path "$policy/model" --data.prompt_dataset "$policy/prompts.jsonl" \
        --eval.dataset "$policy/heldout.jsonl" --arms "$arm" --schemes "$scheme" --seeds "$seed" --out "$RUNS/$name"'
command=("$python" -m qarl_openrlhf.cli.ablate_objectives "${shared[@]}")
if [ -n "${QARL_DRY_RUN:-}" ]; then
    plan "$@" | while read -r seed scheme arm; do
        piece "seed $seed $scheme $arm" "$seconds" "${command[@]}" --arms "$arm" --schemes "$scheme" --seeds "$seed" --out "$runs/..."
    done
    exit
fi
export GPUS=$gpus CARDS="${cards[*]}" DEADLINE=$deadline RUNS=$runs POLICY=$policy FOUR_BIT=$four_bit
plan "$@" | xargs --process-slot-var=PLACE -P $((jobs * gpus)) -d '\n' -I @job bash -c "$job" learning @job "${command[@]}" || failed+=(runs)
"$python" -m qarl_openrlhf.cli.report "$runs" --out "$runs" || failed+=(report)
finish
