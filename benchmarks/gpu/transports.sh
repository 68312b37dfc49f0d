#!/usr/bin/env bash
# Pushes of 8B- and 30B-A3B-shaped weights into vLLM. Results: sync_<shape>_<transport>..._<card>.json
#   bash benchmarks/gpu/transports.sh [PIECE ...]
# one GPU:   ipc      8b, w4a16 and BF16, and OpenRLHF's own push by handles, one a parameter
#            ipc_moe  30b-a3b, w4a16
# two GPUs:  nccl     8b, w4a16 and BF16, and OpenRLHF's own push, one RPC and broadcast a parameter
#            no_p2p   8b, w4a16 and BF16 without peer-to-peer access (NCCL through host memory)
#            nccl_moe 30b-a3b, w4a16 and BF16
# four GPUs: zero3    30b-a3b, w4a16, master weights in shards on two GPUs (ZeRO-3), an engine over the other two
#            zero3_ep the same, the engine's GPUs holding whole experts
# Without arguments, what the GPUs of this machine allow. 20 pushes each; decode speed before and after.
set -uo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
known "ipc ipc_moe nccl no_p2p nccl_moe zero3 zero3_ep" "$@"
cd "$root"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ $# -eq 0 ]; then
    set -- ipc ipc_moe
    if [ "$gpus" -ge 2 ] || [ -n "${QARL_DRY_RUN:-}" ]; then set -- nccl no_p2p nccl_moe "$@"; fi
    if [ "$gpus" -ge 4 ] || [ -n "${QARL_DRY_RUN:-}" ]; then set -- zero3 zero3_ep "$@"; fi
fi
push=("$python" -m qarl_openrlhf.cli.bench_sync --pushes 20 --decode --out "$out")
zero3=("${push[@]}" --shape 30b-a3b --schemes w4a16 --transport nccl --learner_ranks 2 --tp 2)
for name in "$@"; do
    case $name in
        nccl) piece nccl 300 "${push[@]}" --shape 8b --schemes w4a16 bf16 --transport nccl --openrlhf ;;
        no_p2p)
            # NCCL then goes through /dev/shm; where that is small (a container's 64 MB), through sockets.
            shm=()
            if [ "$(df --output=avail -m /dev/shm 2>/dev/null | tail -1)" -lt 1024 ]; then shm=(NCCL_SHM_DISABLE=1); fi
            piece no_p2p 300 env NCCL_P2P_DISABLE=1 ${shm[@]+"${shm[@]}"} "${push[@]}" --shape 8b --schemes w4a16 bf16 --transport nccl
            ;;
        nccl_moe) piece nccl_moe 400 "${push[@]}" --shape 30b-a3b --schemes w4a16 bf16 --transport nccl ;;
        zero3) piece zero3 280 "${zero3[@]}" ;;
        zero3_ep) piece zero3_ep 280 "${zero3[@]}" --expert_parallel ;;
        ipc) piece ipc 300 "${push[@]}" --shape 8b --schemes w4a16 bf16 --transport ipc --openrlhf ;;
        ipc_moe) piece ipc_moe 250 "${push[@]}" --shape 30b-a3b --schemes w4a16 --transport ipc ;;
    esac
done
finish
