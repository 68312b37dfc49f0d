"""Run an objective once on three tokens when it is built: what would otherwise fail, or train nothing, in a Ray worker."""

from __future__ import annotations

import torch

from .base import ObjectiveError


@torch.inference_mode(False)
@torch.enable_grad()
def probe(objective) -> None:
    """ObjectiveError if the objective raises, or its loss is not finite, is no float, or carries no gradient.

    Three responses on policy with advantages 1, 0 and -1: the least that every step contains.
    """
    log_probs = torch.zeros(3, 1, requires_grad=True)
    old, ones = torch.zeros(3, 1), torch.ones(3, 1)
    advantages = torch.tensor([1.0, 0.0, -1.0])
    try:
        loss = objective(log_probs, old, old, advantages, ones).loss
        if not loss.isfinite():
            raise ObjectiveError(f"{objective!r}: its loss is {loss.item()} where current, old and sampling policy agree; it must be finite")
        if not loss.requires_grad:
            raise ObjectiveError(
                f"{objective!r}: its values carry no gradient: compute them from units.log_ratio, units.ratio or units.log_probs, "
                "as floats and without detach"
            )
        (gradient,) = torch.autograd.grad(loss, log_probs)
    except ObjectiveError:
        raise
    except Exception as error:  # the surrogate is the user's code
        raise ObjectiveError(f"{objective!r} fails on a batch of three tokens: {type(error).__name__}: {error}") from error
    if not gradient.isfinite().all():
        raise ObjectiveError(f"{objective!r}: its gradient is {gradient.flatten().tolist()} where the policies agree; it must be finite")
