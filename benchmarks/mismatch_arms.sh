#!/usr/bin/env bash
# How far learner and engine are apart, mean |delta log p| a sampled token, for the paper's three arms on free text.
# Trains SmolLM2-135M-Instruct for a few steps at a high learning rate, so that codes change, and keeps each run's
# metrics in benchmarks/results/mismatch_<arm>.jsonl; `python benchmarks/mismatch_arms.py` prints the table.
#   bash benchmarks/mismatch_arms.sh [ARM ...]        arms: bf16 w4a16:g64:rollout w4a16:g64
# env: STEPS=8  LR=6e-5  OUT=runs/mismatch  QARL_VENV=.venv
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../scripts/lib/common.sh"
steps=${STEPS:-8}
lr=${LR:-6e-5}
out=${OUT:-$root/runs/mismatch}
[[ $out == /* ]] || out=$PWD/$out
need STEPS "$steps" "$count" "a whole number of steps, 1 or more"
inputs=$root/runs/inputs
"$root/scripts/setup_env.sh" --cpu
unset PYTHONPATH
python=$venv/bin/python
cd "$root"
[ $# -gt 0 ] || set -- bf16 w4a16:g64:rollout w4a16:g64

"$python" -m qarl_openrlhf.data.smollm2 "$inputs/SmolLM2-135M-Instruct"
"$python" -m qarl_openrlhf.data.reasoning_gym --task basic_arithmetic --style question --n $((steps * 4)) --seed 0 \
    --out "$inputs/arithmetic-$steps.jsonl"
for arm in "$@"; do
    run=$out/${arm//:/-}
    "$python" -m qarl_openrlhf.cli.train_qarl \
        --device cpu --quant.scheme "$arm" --preset tbpo_short --objective.band_scale 512 \
        --actor.model_name_or_path "$inputs/SmolLM2-135M-Instruct" \
        --data.prompt_dataset "$inputs/arithmetic-$steps.jsonl" --data.input_key input --data.label_key label \
        --data.apply_chat_template --data.max_len 160 --reward.remote_url "$root/benchmarks/mismatch_reward.py" \
        --rollout.batch_size 4 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 48 \
        --rollout.micro_batch_size 8 --train.batch_size 8 --train.micro_batch_size 8 \
        --algo.advantage.estimator group_norm --sync.probe_tol 2 \
        --actor.adam.lr "$lr" --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --ds.zero_stage 2 \
        --actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 \
        --train.seed 0 --metrics.dir "$run" --ckpt.output_dir "$run/model" --ckpt.path "$run/checkpoints"
    mkdir -p "$root/benchmarks/results"
    cp "$run/metrics.jsonl" "$root/benchmarks/results/mismatch_${arm//:/-}.jsonl"
done
