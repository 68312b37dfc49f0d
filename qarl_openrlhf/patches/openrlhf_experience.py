"""OpenRLHF's ``Experience`` with one field more, which its batching, padding and splitting then treat like the others.

Whoever unpickles one imports this module, also Ray's queue, a process without our patches: it must import little.
"""

from dataclasses import dataclass

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, tensor_field

from qarl_openrlhf.patches.replacing import replace


@dataclass
class StampedExperience(Experience):
    """``Experience`` whose tokens know the weights they were sampled under.

    weight_versions: int64 [B, A], aligned with ``action_mask``: the version of the published weights, by our own counter;
    -1 where the engine sampled nothing.
    """

    weight_versions: torch.Tensor = tensor_field("step", default=None)


def apply() -> None:
    """experience.py goes through ``fields(Experience)`` of its own module; the others build or name the class."""
    from openrlhf.trainer import ppo_utils
    from openrlhf.trainer.ppo_utils import experience, experience_maker, samples_generator

    for module in (experience, experience_maker, samples_generator, ppo_utils):
        replace(module, "Experience", StampedExperience)
