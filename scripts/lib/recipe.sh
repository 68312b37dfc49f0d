# Sourced by scripts/train_*.sh: what the recipes have in common. Sourcing it sets $root; `train` runs a recipe.
#
# ARM=qarl      w4a16 in learner and engine, TBPO (default)
# ARM=rollout   w4a16 in the engine only, the learner in BF16
# ARM=bf16      no quantization
# The last two use the paper's baseline objective: GRPO with token-level TIS, or GSPO on a mixture of experts.
#
# The prompts come from `python -m qarl_openrlhf.cli.prepare_data --out runs/inputs/math`; QARL_DATA names another file.
# Every flag of train_qarl can be appended and wins: ARM=qarl bash scripts/train_qwen3_8b.sh --quant.scheme fp8 --dry_run
# env: QARL_NODES=1  QARL_GPUS_PER_NODE=8
#      QARL_PLACE=colocated (one node) or apart (half of the GPUs learn, half sample; several nodes: always)
#      QARL_DATA=FILE.jsonl  QARL_REWARD=FILE.py  QARL_RUN_DIR=runs/MODEL-ARM
#      QARL_VENV=.venv  QARL_PRINT_COMMAND=1 (print the command, one quoted line, and stop)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ARM=${ARM:-qarl}
nodes=${QARL_NODES:-1}
gpus=${QARL_GPUS_PER_NODE:-8}
need ARM "$ARM" "qarl|rollout|bf16" "bf16, rollout or qarl"
need QARL_NODES "$nodes" "$count" "a whole number, 1 or more"
need QARL_GPUS_PER_NODE "$gpus" "$count" "a whole number, 1 or more"
# An engine of another node cannot read the learner's GPU memory.
place=${QARL_PLACE:-$([ "$nodes" -gt 1 ] && echo apart || echo colocated)}
need QARL_PLACE "$place" "colocated|apart" "colocated or apart"

# The paper's setting (section 5 and its appendix).
paper=(
    --rollout.batch_size 512 --rollout.n_samples_per_prompt 8  # 512 prompts x 8 samples
    --train.batch_size 512                                     # samples: 64 prompts; 8 updates a rollout
    --data.max_len 18432 --rollout.max_new_tokens 16384        # prompt 2048 + response 16384
    --rollout.temperature 1.0 --rollout.top_p 1.0
    --train.dynamic_batch_enable --train.max_tokens_per_gpu 22528
    --actor.optim muon --actor.muon.lr 1e-6 --actor.adam.weight_decay 0.01
    --algo.advantage.estimator group_norm
    --algo.kl.init_coef 0
)
# Ours; the paper does not say.
ours=(
    --actor.muon.scale match_rms                               # docs/muon.md
    --actor.adam.lr 1e-6                                       # embeddings, lm_head, routers, norms, biases
    --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
    --actor.max_norm 1.0
    --data.apply_chat_template                                 # the model's own, around the instruction of prepare_data
    --ds.packing_samples                                       # no padding; what dynamic micro-batches need
    --actor.gradient_checkpointing_enable
    --actor.logprob_chunk 2048                                 # logits of so many tokens at a time: they are the largest part
    --vllm.enable_prefix_caching                               # a prompt is read once for its eight responses
    --ckpt.save_steps 20 --ckpt.max_num 3
)
# Colocated, learner and engines take turns on the same GPUs.
learn_nodes=$nodes learn_gpus=$gpus sample=$((nodes * gpus))
turns=(--train.colocate_all --vllm.enable_sleep --ds.enable_sleep)
if [ "$place" = apart ]; then
    if (( nodes * gpus % 2 || (nodes > 1 && nodes % 2) )); then
        say "QARL_PLACE=apart halves the GPUs: an even number of nodes, or one node with an even number of GPUs"
        exit 2
    fi
    if (( nodes > 1 )); then learn_nodes=$((nodes / 2)); else learn_gpus=$((gpus / 2)); fi
    sample=$((sample / 2)) turns=()
fi

# usage: train NAME MODEL BASELINE TP CARD [flags]
#   NAME of the run directory, MODEL on the hub or a path, BASELINE objective of the bf16 and rollout arms, TP of an engine,
#   CARD the GiB that a dry run plans for where no GPU is visible.
#   $paper and $ours come first, then [flags]: of the recipe, then of the user.
train() {
    local name=$1 model=$2 baseline=$3 tp=$4 card=$5
    shift 5
    local planned=()
    if ! nvidia-smi -L 2>/dev/null | grep -q .; then planned=(--dry_run_gpu_gb "$card"); fi
    local scheme objective
    case $ARM in
        bf16) scheme=bf16 objective=$baseline ;;
        rollout) scheme=w4a16:rollout objective=$baseline ;;  # group size 128 is ours, the paper does not say
        qarl) scheme=w4a16 objective=tbpo ;;                  # TBPO's defaults are the paper's bands, for 16,384-token responses
    esac
    if (( sample % tp )); then
        say "QARL_NODES x QARL_GPUS_PER_NODE gives engines $sample GPUs, which do not divide into engines of TP $tp"
        exit 2
    fi
    local out=${QARL_RUN_DIR:-$root/runs/$name-$ARM}
    local python=$venv/bin/python liger=()
    # Fused norms and rotary positions, where requirements/liger.txt is installed.
    if compgen -G "$venv/lib/python*/site-packages/liger_kernel" >/dev/null; then liger=(--ds.use_liger_kernel); fi
    local command=("$python" -m qarl_openrlhf.cli.train_qarl
        --actor.model_name_or_path "$model"
        --data.prompt_dataset "${QARL_DATA:-$root/runs/inputs/math/train.jsonl}" --data.input_key prompt --data.label_key label
        --reward.remote_url "${QARL_REWARD:-$root/qarl_openrlhf/rewards/math.py}"
        --quant.scheme "$scheme" --preset "$objective"
        "${paper[@]}" "${ours[@]}" ${turns[@]+"${turns[@]}"} ${planned[@]+"${planned[@]}"} ${liger[@]+"${liger[@]}"}
        --actor.num_nodes "$learn_nodes" --actor.num_gpus_per_node "$learn_gpus"
        --ref.num_nodes "$learn_nodes" --ref.num_gpus_per_node "$learn_gpus"
        --vllm.num_engines $((sample / tp)) --vllm.tensor_parallel_size "$tp"
        --metrics.dir "$out" --ckpt.output_dir "$out/model" --ckpt.path "$out/checkpoints" "$@")
    if [ -n "${QARL_PRINT_COMMAND:-}" ]; then
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    # An environment that is there is taken as it is (`cli.doctor` examines it): set-up would choose by this machine's GPU.
    if [ ! -x "$python" ] || [ -e "$venv/.qarl-incomplete" ]; then "$root/scripts/setup_env.sh"; fi
    unset PYTHONPATH
    cd "$root"
    exec "${command[@]}"
}
