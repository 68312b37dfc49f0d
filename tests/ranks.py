"""A test's process as one rank of a group on this host."""

import os

import torch


def become(rank: int, world: int, port: str) -> None:
    """Set what DeepSpeed and PyTorch read when the group is made; one thread, for the ranks share the cores."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
