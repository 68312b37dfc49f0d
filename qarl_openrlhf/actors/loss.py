"""An objective in the place of OpenRLHF's ``PolicyLoss``."""

import torch


class ObjectiveLoss:
    """Calls the objective and keeps its sums (numerator, denominator) of the last micro-batch in ``.sums``.

    Returns what OpenRLHF's training step unpacks: (loss, clip fraction, KL(old, current), and
    None twice: the mismatch to the engine is measured once for the whole rollout, not here).
    """

    def __init__(self, objective):
        self.objective = objective
        self.sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, **normalisation
    ) -> tuple:
        result = self.objective(log_probs, old_log_probs, rollout_log_probs, advantages, action_mask, **normalisation)
        self.sums = result.sums
        zero = torch.zeros((), device=log_probs.device)
        clipped = 1 - result.metrics["objective/in_band_frac"] if "objective/in_band_frac" in result.metrics else zero
        return result.loss, clipped, result.metrics.get("objective/ppo_kl", zero), None, None
