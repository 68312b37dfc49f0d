"""DeepSpeed 0.19 on a CPU: no compiler run in the middle of a start-up, and ZeRO-3 gathers that are complete.

DeepSpeed compiles a shared-memory all-reduce with g++ when the first process group is made on a CPU (about 20 s, a failure where
no compiler is installed, and, where a build was killed once, an endless wait for the lock it left behind). gloo does the same
work for the few megabytes that travel on one host.
"""

import importlib

import torch

from qarl_openrlhf.patches.replacing import original, replace, replaced
from qarl_openrlhf.patches.versions import require_version


def apply() -> None:
    require_version("deepspeed")
    if torch.cuda.is_available():
        return
    # Not `from deepspeed.comm import torch`: that is PyTorch itself, which deepspeed.comm imports under the module's name.
    torch_backend = importlib.import_module("deepspeed.comm.torch")
    # "not available": DeepSpeed then uses the gloo group for everything
    replace(torch_backend, "build_shm_op", lambda: None)
    _wait_for_every_gather()


def _wait_for_every_gather() -> None:
    """partition_parameters.py:2082 launches an all-gather a parameter and waits for the last one only.

    On a CUDA stream that orders them all. gloo runs them on several threads: what comes late overwrites what has been written
    to the parameter meanwhile, so that with two ranks or more a model loaded under ZeRO-3 now and then has pieces of
    uninitialised memory for weights (seen in a third of the loads of a tiny model).
    """
    from deepspeed.runtime.zero import partition_parameters as zero

    gather = original(zero.Init, "_allgather_params_coalesced")
    original(zero.dist, "all_gather_into_tensor")
    if getattr(gather, "_qarl", False):
        return

    def gather_all(self, *args, **kwargs):
        launched = []
        launch = original(zero.dist, "all_gather_into_tensor")

        def launch_and_remember(*positional, **named):
            launched.append(launch(*positional, **named))
            return launched[-1]

        try:
            with replaced(zero.dist, "all_gather_into_tensor", launch_and_remember):
                return gather(self, *args, **kwargs)
        finally:
            for work in launched:
                work.wait()

    gather_all._qarl = True
    replace(zero.Init, "_allgather_params_coalesced", gather_all)
