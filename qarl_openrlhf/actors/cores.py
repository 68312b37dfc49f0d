"""Threads of a learner's arithmetic on the processor: all of it on a CPU, and an optimizer in main memory beside a GPU."""

import os

import torch

from qarl_openrlhf.runtime import available_cpus


def use_cores(args, group) -> None:
    """Give this process its share of the host's cores; Ray sets one thread per requested CPU and one for a fraction, torchrun one.

    group: ``args.actor`` or ``args.critic``, whichever this process is of.
    """
    if not torch.cuda.is_available():  # learner and engine take turns, so each may use all cores
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", available_cpus())))
    elif args.ds.adam_offload and int(os.environ.get("OMP_NUM_THREADS", 1)) == 1:
        torch.set_num_threads(max(1, available_cpus() // group.num_gpus_per_node))
