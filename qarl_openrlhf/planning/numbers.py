"""Numbers of flags in their range, before anything divides by them, waits for them or samples with them.

argparse takes any number of the right type: a NaN timeout waits forever, a batch of 0 divides by zero somewhere in a Ray worker.
"""

import math
from typing import NamedTuple

from qarl_openrlhf.config import ConfigError


class Range(NamedTuple):
    """Finite numbers ``>= at_least``, ``> above``, ``<= at_most``, ``< below``; ``off`` and (``or_infinite``) infinity besides."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    off: float | None = None
    or_infinite: bool = False

    def holds(self, value: float) -> bool:
        if value == self.off or (self.or_infinite and value == math.inf):
            return True
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = [("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below)]
        text = "a finite number" + " and".join(f" {word} {limit:.10g}" for word, limit in limits if limit is not None)
        return text + ("" if self.off is None else f", or {self.off:g} for never") + (", or inf" if self.or_infinite else "")


COUNT, POSITIVE, NOT_NEGATIVE = Range(at_least=1), Range(above=0), Range(at_least=0)
SHARE, CLOSED_SHARE, OPEN_SHARE = Range(above=0, at_most=1), Range(at_least=0, at_most=1), Range(at_least=0, below=1)
EVERY = Range(at_least=1, off=-1)  # OpenRLHF takes -1 alone for never: it divides by all others
SECONDS = Range(at_least=0.01, at_most=1e7)  # threads cannot wait for longer than Python's clock counts
RANGES = {
    **dict.fromkeys(
        (
            "rollout.batch_size rollout.micro_batch_size rollout.n_samples_per_prompt rollout.vllm_generate_batch_size "
            "rollout.max_new_tokens rollout.max_tokens_per_gpu train.batch_size train.micro_batch_size train.max_epochs "
            "train.num_episodes train.max_tokens_per_gpu train.async_queue_size data.max_len data.max_samples eval.n_samples_per_prompt "
            "actor.num_nodes actor.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node "
            "reward.num_nodes reward.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size ds.tensor_parallel_size "
            "ds.ring_attn_size ds.ring_attn_head_stride ds.zpg ds.lora.alpha sync.probe_every model.max_positions ckpt.max_num "
            "logger.logging_steps algo.kl.horizon"
        ).split(),
        COUNT,
    ),
    **dict.fromkeys(("ckpt.save_steps", "eval.steps"), EVERY),
    **dict.fromkeys(("sync.timeout_s", "reward.timeout_s"), SECONDS),
    **dict.fromkeys(
        (
            "sync.probe_tol rollout.temperature model.rope_theta dry_run_gpu_gb preset_length algo.kl.target actor.adam.eps "
            "critic.adam.eps critic.value_clip"  # Adam with an eps of 0 divides 0 by 0 where a weight has had no gradient
        ).split(),
        POSITIVE,
    ),
    # Below one KiB a push is all overhead, and 1e-9 MiB is no byte at all; a buffer lies on one card.
    "sync.bucket_mb": Range(at_least=1 / 1024, at_most=2**16),
    "ckpt.max_mem": Range(above=0, or_infinite=True),
    "algo.advantage.is_correction_threshold": Range(at_least=0, or_infinite=True),
    **dict.fromkeys(
        (
            "actor.adam.lr critic.adam.lr actor.muon.lr critic.muon.lr actor.adam.weight_decay critic.adam.weight_decay actor.max_norm "
            "critic.max_norm actor.eps_clip actor.eps_clip_low_high actor.aux_loss_coef algo.kl.init_coef eval.temperature "
            "actor.logprob_chunk ds.lora.rank reward.overlong_buffer_len data.dataloader_num_workers data.max_images_per_prompt"
        ).split(),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(("rollout.top_p", "vllm.gpu_memory_utilization"), SHARE),
    **dict.fromkeys(
        (
            "algo.advantage.gamma algo.advantage.lambd actor.lr_warmup_ratio critic.lr_warmup_ratio actor.min_lr_ratio "
            "critic.min_lr_ratio train.ema_beta"
        ).split(),
        CLOSED_SHARE,
    ),
    **dict.fromkeys(("actor.adam.betas", "critic.adam.betas", "ds.lora.dropout"), OPEN_SHARE),
    **dict.fromkeys(("actor.entropy_coef", "reward.overlong_penalty_factor"), Range()),
    "reward.stop_properly_penalty_coef": Range(at_most=1),
    "reward.clip_range": Range(),
    "actor.dual_clip": Range(above=1),
    "ds.zero_stage": Range(at_least=0, at_most=3),
    "train.seed": Range(at_least=0, at_most=2**32 - 1 - 2**16),  # numpy's limit; ranks and engines add their number
}


def check_numbers(flat) -> None:
    """ConfigError for a number out of its range, with the range.

    Args:
        flat: argparse namespace with dotted names, before OpenRLHF's own checks, which divide.
    """
    for flag, allowed in RANGES.items():
        given = getattr(flat, flag, None)
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if value is not None and not allowed.holds(value):
                raise ConfigError(f"--{flag} {_shown(given)} is out of range: it takes {allowed}")
    for flag in ("reward.clip_range", "algo.advantage.is_correction_threshold"):
        bounds = getattr(flat, flag, None) or []
        if len(bounds) == 2 and bounds[0] >= bounds[1]:
            raise ConfigError(f"--{flag} {_shown(bounds)} leaves nothing between the two: give the lower bound first")
    stop = getattr(flat, "rollout.stop", None)
    if stop is not None and not all(stop):
        raise ConfigError("--rollout.stop has an empty string, which would end every response at once: give texts, or drop the flag")


def _shown(given) -> str:
    return " ".join(f"{value:g}" for value in (given if isinstance(given, (list, tuple)) else [given]))
