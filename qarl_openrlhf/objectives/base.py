"""What every objective reads and returns: a checked batch, its units, the surrogate.

An objective is a surrogate S(r, A) times a mismatch weight w, summed over *units*. A unit is a token or a whole
response; the surrogate is written once, elementwise over units, and does not know which of the two it is given.

    Delta_t = logpi_current - logpi_old           learner against learner, carries the gradient
    delta_t = logpi_old     - logpi_sampler       learner against rollout engine, never does
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# e^20 = 4.9e8: far outside every band and cap, and products of it still fit float32.
LOG_RATIO_LIMIT = 20.0


class ObjectiveError(ValueError):
    """A bad objective name, hyperparameter or input. The message names it and says what exists or would work."""


@dataclass(frozen=True)
class Units:
    """What a surrogate sees, one entry a token ([B, T]) or a response ([B]); all three float32 and of one shape.

    ``log_ratio``: Delta of a token, or the mean Delta of a response; carries the gradient.
    ``advantages``: A; a response's is the mean over its tokens.
    ``log_probs``: logpi_current, or its mean over the response; carries the gradient.
    Entries outside the action mask are 0 in all three.
    """

    log_ratio: Tensor
    advantages: Tensor
    log_probs: Tensor

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()


@dataclass(frozen=True)
class Surrogate:
    """What a surrogate returns, every field of its units' shape.

    ``values``: what is maximised, before the mismatch weight.
    ``above``, ``below`` (bool): the ratio lies above or below the trust band that belongs to this advantage's sign.
    A surrogate without a band leaves them out, and everything counts as in band.
    ``outside`` (bool): the unit is out of the objective altogether (a rejected response): its gradient is zero
    and ``drop`` takes it out of the denominator. Clipped tokens of a token objective are not outside.
    ``weight_band``: (low, high) to clip the mismatch weight to.
    """

    values: Tensor
    above: Tensor | None = None
    below: Tensor | None = None
    outside: Tensor | None = None
    weight_band: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Batch:
    """A checked batch: ``mask`` bool [B, T], the rest float32 [B, T] and 0 outside the mask.

    ``log_ratio`` is Delta (with gradient), ``mismatch`` is delta (without); both are clamped to +-20.
    """

    mask: Tensor
    log_ratio: Tensor
    mismatch: Tensor
    advantages: Tensor
    log_probs: Tensor

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each response, float32 [B]."""
        return self.mask.sum(-1, dtype=torch.float32)

    @cached_property
    def nonempty(self) -> Tensor:
        """Responses with at least one token, bool [B]. The others count nowhere."""
        return self.mask.any(-1)

    def response_mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each response, [B, T] -> [B]; 0 for an empty response."""
        return values.sum(-1) / self.lengths.clamp(min=1)

    def tokens(self) -> Units:
        return Units(self.log_ratio, self.advantages, self.log_probs)

    def responses(self) -> Units:
        return Units(*(self.response_mean(x) for x in (self.log_ratio, self.advantages, self.log_probs)))

    def response_tokens(self) -> Units:
        """The token form of the responses, [B, T], as GSPO-token (arXiv 2507.18071, eq. 13-14) has it.

        Every token has its response's ratio and advantage as values, and its own log-probability's gradient. The mean
        over tokens has the value and gradient of ``responses()``; weights by token can be put between the two.
        """
        whole = self.responses()

        def spread(mean: Tensor, token: Tensor) -> Tensor:
            return torch.where(self.mask, mean.detach()[:, None] + (token - token.detach()), 0.0)

        return Units(
            spread(whole.log_ratio, self.log_ratio),
            torch.where(self.mask, whole.advantages[:, None], 0.0),
            spread(whole.log_probs, self.log_probs),
        )


def prepare(log_probs, old_log_probs, rollout_log_probs, advantages, action_mask) -> Batch:
    """Check the inputs, mask them, then clamp both log-ratios to +-20 once (nothing later clamps them again).

    All [B, T]; ``advantages`` may be [B]. Positions outside ``action_mask`` may hold anything, NaN included.
    A rollout log-prob of -inf (the engine says "impossible", the learner disagrees) is a delta of +20.

    Raises ObjectiveError for a wrong shape, and for a NaN or infinity inside the mask, naming tensor and row.
    """
    tensors = {
        "log_probs": log_probs,
        "old_log_probs": old_log_probs,
        "rollout_log_probs": rollout_log_probs,
        "advantages": advantages,
        "action_mask": action_mask,
    }
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ObjectiveError(
                f"{name} must be a tensor, got {type(tensor).__name__}"
                + (": ask the engine for its log-probs" if name == "rollout_log_probs" else "")
            )
    if log_probs.ndim != 2:
        raise ObjectiveError(f"log_probs must be [batch, tokens], got {list(log_probs.shape)}")
    if advantages.ndim == 1 and advantages.shape[0] == log_probs.shape[0]:
        advantages = tensors["advantages"] = advantages[:, None].expand_as(log_probs)
    for name, tensor in tensors.items():
        if tensor.shape != log_probs.shape:
            raise ObjectiveError(f"{name} is {list(tensor.shape)} but log_probs is {list(log_probs.shape)}")

    # where() before any arithmetic: 0 * NaN and 0 * inf are NaN, so a product with the mask would not do.
    mask = action_mask.bool()
    masked = {name: torch.where(mask, t.float(), 0.0) for name, t in tensors.items() if name != "action_mask"}
    for name in ("old_log_probs", "rollout_log_probs", "advantages"):
        masked[name] = masked[name].detach()
    _check_finite(masked)

    def clamped(difference: Tensor) -> Tensor:
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    return Batch(
        mask=mask,
        log_ratio=clamped(masked["log_probs"] - masked["old_log_probs"]),
        mismatch=clamped(masked["old_log_probs"] - masked["rollout_log_probs"]),
        advantages=masked["advantages"],
        log_probs=masked["log_probs"],
    )


def _check_finite(masked: dict[str, Tensor]) -> None:
    def bad(name: str) -> Tensor:
        values = masked[name].detach()
        return values.isnan() | values.isposinf() if name == "rollout_log_probs" else ~values.isfinite()

    # One flag for all tensors, so that a GPU is waited for once.
    if not torch.stack([bad(name).any() for name in masked]).any():
        return
    for name in masked:
        rows, columns = bad(name).nonzero(as_tuple=True)
        if len(rows):
            row, column = int(rows[0]), int(columns[0])
            raise ObjectiveError(
                f"{name} is {masked[name][row, column].item()} in row {row}, token {column}"
                f" ({len(rows)} such tokens in {len(rows.unique())} of {len(masked[name])} rows)"
            )
