#!/usr/bin/env bash
# QaRL from nothing on a machine without a GPU: sets the environment up and trains SmolLM2-135M-Instruct, W4A16 + TBPO, on
# single-digit sums of reasoning-gym. Arguments are flags of train_qarl and win, e.g. the paper's other two arms:
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --quant.scheme w4a16:g64:rollout
#   bash scripts/quickstart.sh --quant.scheme bf16
# env: QARL_QUICKSTART_STEPS=15  QARL_QUICKSTART_SEED=0  QARL_QUICKSTART_LR=1e-5  QARL_QUICKSTART_DIR=runs/quickstart
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
steps=${QARL_QUICKSTART_STEPS:-15}
seed=${QARL_QUICKSTART_SEED:-0}
lr=${QARL_QUICKSTART_LR:-1e-5}
out=${QARL_QUICKSTART_DIR:-$root/runs/quickstart}
inputs=$root/runs/inputs
"$root/scripts/setup_env.sh" --cpu
unset PYTHONPATH
python=${QARL_VENV:-$root/.venv}/bin/python
cd "$root"

"$python" -m qarl_openrlhf.data.smollm2 "$inputs/SmolLM2-135M-Instruct"
# Four worked examples, one a line, then the open problem; the same examples for every seed.
"$python" -m qarl_openrlhf.data.reasoning_gym --task chain_sum --style equation --shots 4 --shot_seed 3 --exclude " - " \
    --config min_terms=2 max_terms=2 min_digits=1 max_digits=1 --n $((steps * 8)) --seed "$seed" --out "$inputs/sums-$steps-$seed.jsonl"

exec "$python" -m qarl_openrlhf.cli.train_qarl \
    --device cpu \
    --quant.scheme w4a16:g64 \
    --preset tbpo_short --objective.band_scale 256 \
    --actor.model_name_or_path "$inputs/SmolLM2-135M-Instruct" \
    --data.prompt_dataset "$inputs/sums-$steps-$seed.jsonl" --data.input_key input --data.label_key label --data.max_len 64 \
    --reward.remote_url "$root/qarl_openrlhf/rewards/reasoning_gym.py" \
    --rollout.batch_size 8 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 6 --rollout.stop $'\n' \
    --rollout.micro_batch_size 16 --train.batch_size 16 --train.micro_batch_size 16 \
    --algo.advantage.estimator group_norm \
    --actor.adam.lr "$lr" --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --ds.zero_stage 2 \
    --actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 \
    --train.seed "$seed" --metrics.dir "$out" --ckpt.output_dir "$out/model" --ckpt.path "$out/checkpoints" "$@"
