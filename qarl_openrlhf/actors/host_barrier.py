"""Learners wait for each other without their GPUs.

NCCL's barrier is a kernel that spins until the last rank arrives. An engine that shares such a GPU gets half of its time
meanwhile, and it is an engine's work (loading a push, scoring the probe) that the others wait for. This one goes through the
store that the process group was made with.
"""

from datetime import timedelta

import torch.distributed as dist

LIMIT = timedelta(hours=1)  # of NCCL's barriers under OpenRLHF, too


class HostBarrier:
    """Call it on every rank of the default process group."""

    def __init__(self):
        self.passed = 0

    def __call__(self) -> None:
        world = dist.get_world_size()
        if world == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        self.passed += 1
        here = f"qarl_host_barrier/{self.passed}"
        if store.add(f"{here}/arrived", 1) == world:
            store.set(f"{here}/all", "")
        store.wait([f"{here}/all"], LIMIT)
        if dist.get_rank() == 0 and self.passed > 1:  # all ranks have left the one before
            for key in ("arrived", "all"):
                store.delete_key(f"qarl_host_barrier/{self.passed - 1}/{key}")
