"""Numbers of flags in their range, before anything divides by them, waits for them or samples with them.

argparse takes any number of the right type: a NaN timeout waits forever, a batch of 0 divides by zero somewhere in a Ray worker.
"""

import math
from typing import NamedTuple

from qarl_openrlhf.config import ConfigError


class Range(NamedTuple):
    """Finite numbers ``>= at_least``, ``> above``, ``<= at_most``."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        limits = [("at least", self.at_least), ("above", self.above), ("at most", self.at_most)]
        return "a finite number" + " and".join(f" {word} {limit:.10g}" for word, limit in limits if limit is not None)


COUNT, POSITIVE, NOT_NEGATIVE = Range(at_least=1), Range(above=0), Range(at_least=0)
SHARE, CLOSED_SHARE = Range(above=0, at_most=1), Range(at_least=0, at_most=1)
RANGES = {
    **dict.fromkeys(
        (
            "rollout.batch_size rollout.micro_batch_size rollout.n_samples_per_prompt rollout.vllm_generate_batch_size "
            "rollout.max_new_tokens rollout.max_tokens_per_gpu train.batch_size train.micro_batch_size train.max_epochs "
            "train.num_episodes train.max_tokens_per_gpu train.async_queue_size data.max_len data.max_samples eval.n_samples_per_prompt "
            "actor.num_nodes actor.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size ds.tensor_parallel_size "
            "ds.ring_attn_size ds.zpg sync.probe_every model.max_positions"
        ).split(),
        COUNT,
    ),
    **dict.fromkeys(
        "sync.timeout_s sync.probe_tol reward.timeout_s rollout.temperature model.rope_theta dry_run_gpu_gb preset_length".split(), POSITIVE
    ),
    "sync.bucket_mb": Range(at_least=1 / 1024),  # below one KiB a push is all overhead, and 1e-9 MiB is no byte at all
    **dict.fromkeys(
        "actor.adam.lr critic.adam.lr actor.muon.lr critic.muon.lr algo.kl.init_coef eval.temperature actor.logprob_chunk".split(), NOT_NEGATIVE
    ),
    **dict.fromkeys(("rollout.top_p", "vllm.gpu_memory_utilization"), SHARE),
    **dict.fromkeys("algo.advantage.gamma algo.advantage.lambd actor.lr_warmup_ratio critic.lr_warmup_ratio".split(), CLOSED_SHARE),
    "ds.zero_stage": Range(at_least=0, at_most=3),
    "train.seed": Range(at_least=0, at_most=2**32 - 1 - 2**16),  # numpy's limit; ranks and engines add their number
}


def check_numbers(flat) -> None:
    """ConfigError for a number out of its range, with the range.

    Args:
        flat: argparse namespace with dotted names, before OpenRLHF's own checks, which divide.
    """
    for flag, allowed in RANGES.items():
        value = getattr(flat, flag, None)
        if value is not None and not allowed.holds(value):
            raise ConfigError(f"--{flag} {value:g} is out of range: it takes {allowed}")
    stop = getattr(flat, "rollout.stop", None)
    if stop is not None and not all(stop):
        raise ConfigError("--rollout.stop has an empty string, which would end every response at once: give texts, or drop the flag")
