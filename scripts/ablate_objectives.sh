#!/usr/bin/env bash
# The paper's comparisons on the quickstart's model and task, on a machine without a GPU: eight objectives under QaRL W4A16
# (Figure 8), and TBPO and GRPO+TIS also under BF16 and with a quantized rollout only (Figure 7, Table 3). One run each, one
# after another; stopped, the same command goes on where it was. Tables and pictures: $QARL_ABLATION_DIR/summary.md beside them.
#   bash scripts/ablate_objectives.sh                                  24 runs of about 10 minutes each on two cores
#   bash scripts/ablate_objectives.sh --dry_run                        the train_qarl commands
#   bash scripts/ablate_objectives.sh --actor.adam.lr 5e-6             more flags of train_qarl, for every run
# env: QARL_ABLATION_STEPS=15  QARL_ABLATION_SEEDS=0,1  QARL_ABLATION_DIR=runs/ablation
#      QARL_ABLATION_ARMS=... and QARL_ABLATION_SCHEMES=...  one comparison of your own in place of the paper's two
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib/common.sh"
steps=${QARL_ABLATION_STEPS:-15}
seeds=${QARL_ABLATION_SEEDS:-0,1}
out=${QARL_ABLATION_DIR:-$root/runs/ablation}
need QARL_ABLATION_STEPS "$steps" "$count" "a whole number of steps, 1 or more"
need QARL_ABLATION_SEEDS "$seeds" "[0-9]+(,[0-9]+)*" "whole numbers with commas between them, e.g. 0,1"
inputs=$root/runs/inputs
"$root/scripts/setup_env.sh" --cpu
unset PYTHONPATH
python=$venv/bin/python
cd "$root"

"$python" -m qarl_openrlhf.data.smollm2 "$inputs/SmolLM2-135M-Instruct" >&2
# One set of problems for all runs; a seed shuffles them and seeds the sampling.
prompts=$inputs/sums-ablation-$steps.jsonl
"$python" -m qarl_openrlhf.data.reasoning_gym --task chain_sum --style equation --shots 4 --shot_seed 3 --exclude " - " \
    --config min_terms=2 max_terms=2 min_digits=1 max_digits=1 --n $((steps * 8)) --seed 0 --out "$prompts" >&2

compare() { # ARMS SCHEMES [flags]
    "$python" -m qarl_openrlhf.cli.ablate_objectives --arms "$1" --schemes "$2" --seeds "$seeds" --out "$out" \
        --device cpu \
        --objective.band_scale 256 \
        --actor.model_name_or_path "$inputs/SmolLM2-135M-Instruct" \
        --data.prompt_dataset "$prompts" --data.input_key input --data.label_key label --data.max_len 64 \
        --reward.remote_url "$root/qarl_openrlhf/rewards/reasoning_gym.py" \
        --rollout.batch_size 8 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 6 --rollout.stop $'\n' \
        --rollout.micro_batch_size 16 --train.batch_size 16 --train.micro_batch_size 16 \
        --algo.advantage.estimator group_norm \
        --actor.adam.lr 1e-5 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --ds.zero_stage 2 \
        --actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 "${@:3}"
}

if [ -n "${QARL_ABLATION_ARMS:-}${QARL_ABLATION_SCHEMES:-}" ]; then
    compare "${QARL_ABLATION_ARMS:-tbpo,grpo_tis}" "${QARL_ABLATION_SCHEMES:-w4a16:g64}" "$@"
    exit
fi
status=0
compare tbpo,gspo,mis_gspo,positive_grpo,onpolicy_grpo,dual_clip,sapo,grpo_tis w4a16:g64 "$@" || status=$?
compare tbpo,grpo_tis bf16,w4a16:g64:rollout "$@" || status=$?
exit "$status"
