#!/usr/bin/env bash
# QaRL from nothing on a machine without a GPU: sets the environment up and trains SmolLM2-135M-Instruct, W4A16 + TBPO, on
# single-digit sums of reasoning-gym. Arguments are flags of train_qarl and win, e.g. the paper's other two arms:
#   bash scripts/quickstart.sh
#   QARL_QUICKSTART_DIR=runs/rollout bash scripts/quickstart.sh --quant.scheme w4a16:g64:rollout
#   QARL_QUICKSTART_DIR=runs/bf16 bash scripts/quickstart.sh --quant.scheme bf16
# env: QARL_QUICKSTART_STEPS=15  QARL_QUICKSTART_SEED=0  QARL_QUICKSTART_LR=5e-6  QARL_QUICKSTART_DIR=runs/quickstart
# scripts/quickstart_gpu.sh is the same job on one GPU.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/common.sh"
steps=${QARL_QUICKSTART_STEPS:-15}
seed=${QARL_QUICKSTART_SEED:-0}
lr=${QARL_QUICKSTART_LR:-5e-6}
out=${QARL_QUICKSTART_DIR:-$root/runs/quickstart}
device=${QARL_QUICKSTART_DEVICE:-cpu}
need QARL_QUICKSTART_STEPS "$steps" "$count" "a whole number of steps, 1 or more"
need QARL_QUICKSTART_SEED "$seed" "0|$count" "a whole number, 0 or more"
need QARL_QUICKSTART_LR "$lr" '[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?' "a learning rate, e.g. 5e-6"
need QARL_QUICKSTART_DEVICE "$device" "cpu|cuda" "cpu or cuda"
inputs=$root/runs/inputs
if [ "$device" = cuda ] && ! nvidia-smi -L 2>/dev/null | grep -q .; then
    say "no NVIDIA GPU answers here (nvidia-smi -L): scripts/quickstart.sh is the same job on a CPU"
    exit 1
fi
if [ "$device" = cuda ]; then  # learner and engine take turns on one GPU; ipc carries the push
    prompts=32 mini=64 micro=64
    placement=(--train.colocate_all --vllm.gpu_memory_utilization 0.3)
else
    prompts=8 mini=16 micro=16
    placement=()
fi
"$root/scripts/setup_env.sh" "--$device"
unset PYTHONPATH
python=$venv/bin/python
cd "$root"

"$python" -m qarl_openrlhf.data.smollm2 "$inputs/SmolLM2-135M-Instruct"
# Four worked examples, one a line, then the open problem; the same examples for every seed.
"$python" -m qarl_openrlhf.data.reasoning_gym --task chain_sum --style equation --shots 4 --shot_seed 3 --exclude " - " \
    --config min_terms=2 max_terms=2 min_digits=1 max_digits=1 --n $((steps * prompts)) --seed "$seed" --out "$inputs/sums-$((steps * prompts))-$seed.jsonl"

exec "$python" -m qarl_openrlhf.cli.train_qarl \
    --device "$device" ${placement[@]+"${placement[@]}"} \
    --quant.scheme w4a16:g64 \
    --preset tbpo_short --objective.band_scale 256 \
    --actor.model_name_or_path "$inputs/SmolLM2-135M-Instruct" \
    --data.prompt_dataset "$inputs/sums-$((steps * prompts))-$seed.jsonl" --data.input_key input --data.label_key label --data.max_len 64 \
    --reward.remote_url "$root/qarl_openrlhf/rewards/reasoning_gym.py" \
    --rollout.batch_size "$prompts" --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 6 --rollout.stop $'\n' \
    --rollout.micro_batch_size "$micro" --train.batch_size "$mini" --train.micro_batch_size "$micro" \
    --algo.advantage.estimator group_norm \
    --actor.adam.lr "$lr" --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --ds.zero_stage 2 \
    --actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 \
    --train.seed "$seed" --metrics.dir "$out" --ckpt.output_dir "$out/model" --ckpt.path "$out/checkpoints" "$@"
