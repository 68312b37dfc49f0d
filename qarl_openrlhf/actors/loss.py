"""The loss function of the learner's step, and what it keeps of the last micro-batch for the metrics."""

import torch


class ObservedLoss:
    """OpenRLHF's own loss, unchanged. ``.log_probs``: current log-probs [B, A], detached; ``.normalisation``: OpenRLHF's counts."""

    sums: dict = {}
    tokens = None

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, log_probs, *args, **kwargs) -> tuple:
        self.log_probs = log_probs.detach()
        self.normalisation = {name: kwargs[name] for name in ("dp_size", "batch_num_tokens") if name in kwargs}
        return self.loss(log_probs, *args, **kwargs)


class ObjectiveLoss:
    """An objective in the place of OpenRLHF's ``PolicyLoss``.

    Keeps, of the last micro-batch: ``.sums`` (numerator, denominator), ``.tokens`` (``TokenStates``), ``.log_probs`` and
    ``.normalisation`` as above. ``.global_kept``: set before each optimizer step under ``drop``, see ``actors/kept.py``.

    Returns what OpenRLHF's training step unpacks: (loss, clip fraction, KL(old, current), and
    None twice: the mismatch to the engine is measured once for the whole rollout, not here).
    """

    def __init__(self, objective):
        self.objective = objective
        self.global_kept: torch.Tensor | None = None
        self.sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, **normalisation
    ) -> tuple:
        result = self.objective(
            log_probs, old_log_probs, rollout_log_probs, advantages, action_mask, global_kept=self.global_kept, **normalisation
        )
        self.sums, self.tokens = result.sums, result.tokens
        self.log_probs, self.normalisation = log_probs.detach(), normalisation
        zero = torch.zeros((), device=log_probs.device)
        clipped = 1 - result.metrics["objective/in_band_frac"] if "objective/in_band_frac" in result.metrics else zero
        return result.loss, clipped, result.metrics.get("objective/ppo_kl", zero), None, None
