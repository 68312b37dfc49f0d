"""OpenRLHF 0.11.2 on a machine without CUDA, and the waits in it that never end.

What our own subclasses can override is overridden there (``qarl_openrlhf.actors``); only module-level code that no subclass
reaches is replaced here.
"""

import torch

from qarl_openrlhf.patches.replacing import original, replace, replaced
from qarl_openrlhf.patches.versions import require_version


def apply() -> None:
    require_version("openrlhf")
    if not torch.cuda.is_available():
        _replay_buffer_on_cpu()
        _device_mesh_on_cpu()
    _bounded_placement_groups()

    from qarl_openrlhf.patches import openrlhf_experience

    openrlhf_experience.apply()


def _replay_buffer_on_cpu() -> None:
    """replay_buffer.py:40 builds ``torch.device(f"cuda:{current_device()}")``: here "cuda:cpu", an invalid string."""
    from openrlhf.trainer.ppo_utils import replay_buffer

    init = original(replay_buffer.NaiveReplayBuffer, "__init__")
    if getattr(init, "_qarl", False):
        return

    def __init__(self, *args, **kwargs):
        with replaced(torch.cuda, "current_device", lambda: 0):
            init(self, *args, **kwargs)
        self.target_device = torch.device("cpu")

    __init__._qarl = True
    replace(replay_buffer.NaiveReplayBuffer, "__init__", __init__)


def _device_mesh_on_cpu() -> None:
    """deepspeed.py:105 asks for a "cuda" mesh, whatever the machine has."""
    from openrlhf.utils.deepspeed import deepspeed as host

    mesh = original(host, "init_device_mesh")
    if not getattr(mesh, "_qarl", False):

        def init_device_mesh(_device, *args, **kwargs):
            return mesh("cpu", *args, **kwargs)

        init_device_mesh._qarl = True
        replace(host, "init_device_mesh", init_device_mesh)


def _bounded_placement_groups() -> None:
    """``ray.get(pg.ready())`` waits for ever for a resource that the cluster does not have.

    Replaced where OpenRLHF imports it: the group is awaited for a minute and the error names what is missing.
    """
    from openrlhf.trainer.ray import launcher, vllm_engine

    from qarl_openrlhf.runtime import placement_group

    for module in (launcher, vllm_engine):
        replace(module, "placement_group", placement_group)
