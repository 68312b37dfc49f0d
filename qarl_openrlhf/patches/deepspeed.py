"""DeepSpeed 0.19 on a CPU: no compiler run in the middle of a start-up.

DeepSpeed compiles a shared-memory all-reduce with g++ when the first process group is made on a CPU (about 20 s, and a
failure where no compiler is installed). gloo does the same work for the few megabytes that travel on one host.
"""

import torch

from qarl_openrlhf.patches.versions import require_version


def apply() -> None:
    require_version("deepspeed", ">=0.19,<0.20")
    if torch.cuda.is_available():
        return
    from deepspeed.comm import torch as torch_backend

    torch_backend.build_shm_op = lambda: None  # "not available": DeepSpeed then uses the gloo group for everything
