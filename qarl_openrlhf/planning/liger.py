"""Where OpenRLHF's ``--ds.use_liger_kernel`` works: Liger's fused norms, rotary positions and gated activations in the learner.

Liger puts classes of its own in the places of a model's norms and MLPs. Their projections are plain linear layers, which a scheme
quantizes as before. Of a mixture of experts Qwen3-MoE has its norms and rotary positions (patches.liger).
"""

from contextlib import suppress
from importlib.util import find_spec

from transformers import AutoConfig

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.patches.liger import FAMILIES

INSTALL = "pip install --no-deps -r requirements/liger.txt"


def check_liger(args, device: str) -> None:
    """ConfigError where the flag is on and cannot work: on a CPU, without the package, for a mixture of experts."""
    if not args.ds.use_liger_kernel:
        return
    if device == "cpu":
        raise ConfigError("--ds.use_liger_kernel runs kernels for GPUs: drop it on a CPU")
    if find_spec("liger_kernel") is None:
        raise ConfigError(f"--ds.use_liger_kernel needs liger-kernel, which is not installed: {INSTALL}")
    config = None
    with suppress(OSError, ValueError):  # no such model: told elsewhere
        config = AutoConfig.from_pretrained(args.actor.model_name_or_path, trust_remote_code=True).get_text_config()
    if getattr(config, "num_experts", 0) and config.model_type not in FAMILIES:
        raise ConfigError(
            f"--ds.use_liger_kernel replaces the experts of a {config.model_type}, which this system computes itself: drop it (of mixtures "
            f"of experts it knows {', '.join(FAMILIES)})"
        )
