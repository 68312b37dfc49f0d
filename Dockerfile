# The CUDA stack of requirements/ on NVIDIA's CUDA 13 image. Build and look around:
#   docker build -t qarl_openrlhf .
#   docker run --rm --gpus all --ipc host qarl_openrlhf                      examines the machine (cli.doctor)
# Train (--ipc host: NCCL and Ray need more than a container's 64 MiB of /dev/shm):
#   docker run --rm --gpus all --ipc host -e ARM=qarl -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#       -v "$PWD/runs:/opt/qarl_openrlhf/runs" qarl_openrlhf bash scripts/train_qwen3_8b.sh
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/qarl_openrlhf
COPY . .
RUN scripts/setup_env.sh --cuda && rm -rf /root/.cache/pip
ENV PATH=/opt/qarl_openrlhf/.venv/bin:$PATH
CMD ["python", "-m", "qarl_openrlhf.cli.doctor"]
