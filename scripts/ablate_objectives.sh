#!/usr/bin/env bash
# The paper's comparisons on a machine without a GPU: eight objectives under QaRL W4A16 (Figure 8), and TBPO and GRPO+TIS also
# under BF16 and with a quantized rollout only (Figure 7, Table 3). The policy is a Qwen3 of 1.4M parameters, made first (five
# minutes of one core), that solves 40 % of its sums of five terms, written out step by step. One run each, one after another;
# stopped, the same command goes on where it was. Tables and pictures: $QARL_ABLATION_DIR/summary.md and beside it.
#   bash scripts/ablate_objectives.sh                                  24 runs of two to three minutes each on two busy cores
#   bash scripts/ablate_objectives.sh --dry_run                        the train_qarl commands (makes the policy, which they are checked with)
#   bash scripts/ablate_objectives.sh --actor.adam.lr 1e-4             more flags of train_qarl, for every run
# env: QARL_ABLATION_STEPS=16  QARL_ABLATION_SEEDS=0,1  QARL_ABLATION_DIR=runs/ablation
#      QARL_ABLATION_ARMS=... and QARL_ABLATION_SCHEMES=...  one comparison of your own in place of the paper's two
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/common.sh"
steps=${QARL_ABLATION_STEPS:-16}
seeds=${QARL_ABLATION_SEEDS:-0,1}
out=${QARL_ABLATION_DIR:-$root/runs/ablation}
need QARL_ABLATION_STEPS "$steps" "[1-9][0-9]?|100" "a whole number of steps, 1 to 100"
need QARL_ABLATION_SEEDS "$seeds" "[0-9]+(,[0-9]+)*" "whole numbers with commas between them, e.g. 0,1"
policy=$root/runs/inputs/sums-qwen3
"$root/scripts/setup_env.sh" --cpu
unset PYTHONPATH
python=$venv/bin/python
cd "$root"

# One policy and one set of prompts for all runs; a seed shuffles the prompts and seeds the sampling.
"$python" -m qarl_openrlhf.data.small_qwen3 "$policy" --style steps --config min_terms=5 max_terms=5 min_digits=1 max_digits=1 \
    --slips 0.15 --prompts 1600 --layers 2 --hidden 256 --intermediate 512 --lr 2e-3 --steps 600 --check_every 25 --stop_at 0.4 >&2

compare() { # ARMS SCHEMES [flags]
    "$python" -m qarl_openrlhf.cli.ablate_objectives --arms "$1" --schemes "$2" --seeds "$seeds" --out "$out" \
        --device cpu \
        --objective.band_scale 64 \
        --actor.model_name_or_path "$policy/model" \
        --data.prompt_dataset "$policy/prompts.jsonl" --data.input_key input --data.label_key label --data.max_len 128 \
        --data.max_samples $((steps * 16)) \
        --reward.remote_url "$root/qarl_openrlhf/rewards/reasoning_gym.py" \
        --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 64 \
        --rollout.micro_batch_size 64 --train.batch_size 32 --train.micro_batch_size 32 \
        --algo.advantage.estimator group_norm \
        --actor.adam.lr 3e-4 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --ds.zero_stage 2 \
        --actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 "${@:3}"
}

if [ -n "${QARL_ABLATION_ARMS:-}${QARL_ABLATION_SCHEMES:-}" ]; then
    compare "${QARL_ABLATION_ARMS:-tbpo,grpo_tis}" "${QARL_ABLATION_SCHEMES:-w4a16}" "$@"
    exit
fi
status=0
compare tbpo,gspo,mis_gspo,positive_grpo,onpolicy_grpo,dual_clip,sapo,grpo_tis w4a16 "$@" || status=$?
compare tbpo,grpo_tis bf16,w4a16:rollout "$@" || status=$?
exit "$status"
