"""The objective: surrogate times weight, summed over units, divided by OpenRLHF's global counts.

Normalisation is OpenRLHF's: ``batch_num_tokens`` and ``global_batch_size`` (non-empty responses) are counted over all
ranks and micro-batches of an optimizer step and divided by the number of accumulation steps; DeepSpeed averages over
ranks and accumulation steps, and ``dp_size`` undoes the first. So a batch gives one gradient however it is split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Callable

import torch
from torch import Tensor

from .base import Batch, ObjectiveError, Surrogate, Units, prepare
from .hyper import Hyperparameter, Param, check_value, hyperparameters_of
from .metrics import Sums, batch_sums, metrics_from_sums
from .probe import probe
from .tokens import Outcome, TokenStates
from .weights import STATISTICS, WEIGHTS, MismatchWeight, mismatch_weight

LEVELS = ("token", "response")
MEANS = ("tokens", "responses")


def _common(
    *,
    is_weight: Annotated[str, Param("mismatch weight", choices=WEIGHTS)] = "token",
    is_cap: Annotated[float, Param("cap C of the mismatch weight", at_least=1)] = 2.0,
    is_statistic: Annotated[str, Param("mis: what must be in [is_low, is_high]", choices=STATISTICS)] = "geometric",
    is_low: Annotated[float, Param("mis: lower end; 0 is none", at_least=0)] = 0.0,
    is_high: Annotated[float, Param("mis: upper end; 0 means is_cap", at_least=0)] = 0.0,
    drop: Annotated[bool, Param("take rejected and out-of-band responses out of the denominator")] = False,
):
    """The hyperparameters that every objective has (``is_weight`` with the objective's own default)."""


@dataclass(frozen=True)
class Spec:
    """A surrogate function and how it is used; what ``@objective`` makes of it.

    ``on_policy``: the objective is meant for one optimizer step a rollout, and the trainer refuses anything else.
    ``drops_by_ratio``: what its surrogate marks as ``outside`` depends on the current policy, not on the advantages alone.
    """

    function: Callable[..., Surrogate]
    level: str
    mean: str
    is_weight: str
    on_policy: bool
    drops_by_ratio: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def own_hyperparameters(self) -> dict[str, Hyperparameter]:
        return hyperparameters_of(self.function)

    @cached_property
    def hyperparameters(self) -> dict[str, Hyperparameter]:
        """Its own and the common ones, by the name that follows ``--objective.``."""
        common = hyperparameters_of(_common)
        taken = {*common, "seq_tis_imp_ratio_cap", "name", "hyperparameters"}
        if clash := [name for name in self.own_hyperparameters if name in taken]:
            raise ObjectiveError(
                f"{self.name}: hyperparameter {clash[0]!r} is a flag that every objective has (--objective.{clash[0]}): give yours another name"
            )
        common["is_weight"] = replace(common["is_weight"], default=self.is_weight)
        if self.level == "response":
            common["seq_tis_imp_ratio_cap"] = replace(common["is_cap"], help="the paper's name for is_cap")
        return {**self.own_hyperparameters, **common}

    def __call__(self, units: Units, **hyperparameters) -> Surrogate:
        return self.function(units, **hyperparameters)


def objective(*, level: str, mean: str, is_weight: str, on_policy: bool = False, drops_by_ratio: bool = True) -> Callable[[Callable], Spec]:
    """Declare a surrogate: ``@objective(level="token", mean="tokens", is_weight="token")`` above its function.

    ``level``: its units are tokens or responses. ``mean``: over all tokens, or over responses (of token means, if the
    units are tokens). ``is_weight``: the default mismatch weight. ``drops_by_ratio=False`` saves ``--objective.drop`` the
    forwards that count what is ``outside``, where the current policy has no say in it.
    """
    if level not in LEVELS or mean not in MEANS or is_weight not in WEIGHTS:
        raise ObjectiveError(
            f"level is one of {LEVELS}, mean of {MEANS}, is_weight of {WEIGHTS}; got {level!r}, {mean!r}, {is_weight!r}"
        )
    if level == "response" and mean == "tokens":
        raise ObjectiveError("an objective with level='response' has mean='responses'")
    return lambda function: Spec(function, level, mean, is_weight, on_policy, drops_by_ratio)


@dataclass(frozen=True)
class ObjectiveResult:
    """``loss``: 0-d, to minimise. ``sums``: see metrics.py. ``metrics``: divided, for this batch. ``tokens``: see tokens.py.

    All but the loss are detached; the last two are computed when they are asked for.
    """

    loss: Tensor
    sums: Sums
    outcome: Outcome

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        return metrics_from_sums(self.sums)

    @cached_property
    def tokens(self) -> TokenStates:
        return self.outcome.tokens()


@dataclass(frozen=True)
class _Evaluated:
    """A batch, its units (responses, if the surrogate is by response), surrogate and weight, and the sum of all."""

    batch: Batch
    units: Units
    surrogate: Surrogate
    weight: MismatchWeight
    total: Tensor


class Objective:
    """A surrogate with its hyperparameters fixed; made by ``build_objective``."""

    def __init__(self, spec: Spec, **given):
        self.spec, self.name = spec, spec.name
        self.level, self.mean, self.on_policy = spec.level, spec.mean, spec.on_policy
        known = spec.hyperparameters
        for name in given:
            if name not in known:
                raise ObjectiveError(f"{self.name} has no hyperparameter {name!r}; it has: {', '.join(known)}")
        hp = {name: check_value(self.name, name, given.get(name, h.default), h) for name, h in known.items()}

        _merge_paper_cap(self.name, hp, known["is_cap"].default)
        if hp["is_weight"] != "mis":
            for name in ("is_statistic", "is_low", "is_high"):
                if hp[name] != known[name].default:
                    raise ObjectiveError(f"{self.name}: {name} is of is_weight='mis', not of {hp['is_weight']!r}")
        self._mis = _mis_band(self.name, hp)
        self.hyperparameters = hp
        self._surrogate_hp = {name: hp[name] for name in spec.own_hyperparameters}
        probe(self)  # a surrogate may refuse what ranges cannot say

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.hyperparameters.items())})"

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        *,
        dp_size: int = 1,
        batch_num_tokens: Tensor | float | None = None,
        global_batch_size: Tensor | float | None = None,
        global_kept: Tensor | float | None = None,
    ) -> ObjectiveResult:
        """The loss of one micro-batch.

        All tensors [B, T] (``advantages`` also [B]), any float dtype, computed in float32. ``batch_num_tokens`` and
        ``global_batch_size``: see the module; None means this batch is all there is. ``global_kept`` replaces them
        under ``drop``: the sum of ``count_kept`` over the same ranks and micro-batches, divided in the same way.

        Raises ObjectiveError for wrong shapes and for NaN or infinity, naming tensor and row.
        """
        done = self._evaluate(prepare(log_probs, old_log_probs, rollout_log_probs, advantages, action_mask))
        denominator = batch_num_tokens if self.mean == "tokens" else global_batch_size
        if self.hyperparameters["drop"]:
            denominator = self._kept_denominator(done, dp_size, denominator, global_kept)
        elif denominator is None:
            denominator = self._count(done.batch)
        denominator = torch.as_tensor(denominator, dtype=torch.float32, device=log_probs.device)
        # An optimizer step without a single (kept) response: the sum is 0 and stays on the graph.
        denominator = torch.where(denominator > 0, denominator, 1.0)
        loss = -done.total / denominator * dp_size
        parts = (done.surrogate, done.weight)
        return ObjectiveResult(loss, batch_sums(done.batch, done.units, *parts), Outcome.of(done.batch, *parts))

    @torch.no_grad()
    def count_kept(self, log_probs, old_log_probs, rollout_log_probs, advantages, action_mask) -> Tensor:
        """Tokens or responses (as the mean is over) that ``drop`` leaves in this micro-batch's denominator; 0-d."""
        batch = prepare(log_probs, old_log_probs, rollout_log_probs, advantages, action_mask)
        return self._count_kept(self._evaluate(batch))

    @cached_property
    def drops_by_ratio(self) -> bool:
        """Whether what ``drop`` leaves depends on the current policy (a response outside its band), not on mismatch and advantages alone."""
        zeros = torch.zeros(1, 1)
        return self.spec.drops_by_ratio and self._evaluate(prepare(zeros, zeros, zeros, zeros, torch.ones(1, 1))).surrogate.outside is not None

    @torch.enable_grad()
    def token_coefficients(self, log_probs, old_log_probs, rollout_log_probs, advantages, action_mask) -> Tensor:
        """d(objective)/d(logpi_t) before normalisation, [B, T]: 0 where a token is clipped, rejected or masked."""
        leaf = log_probs.detach().float().requires_grad_()
        done = self._evaluate(prepare(leaf, old_log_probs, rollout_log_probs, advantages, action_mask))
        return torch.autograd.grad(done.total, leaf)[0]

    def _evaluate(self, batch: Batch) -> _Evaluated:
        hp = self.hyperparameters
        weight = mismatch_weight(batch, hp["is_weight"], hp["is_cap"], **self._mis)
        units = batch.tokens() if self.level == "token" else batch.responses()
        surrogate = self._surrogate(units)
        if surrogate.weight_band is not None:
            weight = weight.clip(*(_like(end, weight.values) for end in surrogate.weight_band))
        values = surrogate.values
        if self.level == "response" and weight.values.ndim == 2:
            values = self._surrogate(batch.response_tokens()).values  # a weight by token needs the response by token
        values = values * _like(weight.values, values)
        if values.ndim == 1:
            total = torch.where(batch.nonempty, values, 0.0).sum()
        else:
            values = torch.where(batch.mask, values, 0.0)
            total = values.sum() if self.mean == "tokens" else batch.response_mean(values).sum()
        return _Evaluated(batch, units, surrogate, weight, total)

    def _surrogate(self, units: Units) -> Surrogate:
        surrogate = self.spec(units, **self._surrogate_hp)
        if not isinstance(surrogate, Surrogate):
            raise ObjectiveError(f"{self.name} must return a Surrogate, got {type(surrogate).__name__}")
        if surrogate.values.shape != units.log_ratio.shape:
            shapes = [list(x.shape) for x in (surrogate.values, units.log_ratio)]
            raise ObjectiveError(f"{self.name}: its values are {shapes[0]} but its units are {shapes[1]}")
        return surrogate

    def _count(self, batch: Batch) -> Tensor:
        return (batch.mask if self.mean == "tokens" else batch.nonempty).sum(dtype=torch.float32)

    def _count_kept(self, done: _Evaluated) -> Tensor:
        kept = done.batch.mask if self.mean == "tokens" else done.batch.nonempty
        if done.weight.rejected is not None:
            kept = kept & ~_like(done.weight.rejected, kept)
        outside = done.surrogate.outside
        if outside is not None:
            kept = kept & ~((outside & done.batch.mask).any(-1) if outside.ndim > kept.ndim else outside)
        return kept.sum(dtype=torch.float32)

    def _kept_denominator(self, done: _Evaluated, dp_size: int, whole, global_kept):
        if global_kept is not None:
            return global_kept
        if dp_size != 1 or (whole is not None and float(whole) != float(self._count(done.batch))):
            raise ObjectiveError(
                f"{self.name}: drop=True divides by what is kept on all ranks and micro-batches; pass global_kept,"
                " the sum of count_kept() over them, divided as batch_num_tokens and global_batch_size are"
            )
        return self._count_kept(done)


def _like(by_response: Tensor, units: Tensor) -> Tensor:
    """[B] -> [B, 1] where the units are tokens."""
    return by_response[:, None] if by_response.ndim < units.ndim else by_response


def _merge_paper_cap(owner: str, hp: dict, default: float) -> None:
    paper = hp.pop("seq_tis_imp_ratio_cap", default)
    if paper == default:
        return
    if hp["is_cap"] not in (default, paper):
        raise ObjectiveError(f"{owner}: is_cap={hp['is_cap']:g} and seq_tis_imp_ratio_cap={paper:g} name one number")
    hp["is_cap"] = paper


def _mis_band(owner: str, hp: dict) -> dict:
    """``statistic``, ``low``, ``high`` of the mis weight.

    band_scale widens a band around 1 that was asked for, of the geometric mean (whose spread goes like 1/sqrt(L)); the
    defaults, no lower end and the cap, are not such a band.
    """
    low, high, statistic = hp["is_low"], hp["is_high"], hp["is_statistic"]
    scale = hp.get("band_scale", 1.0) if statistic == "geometric" else 1.0
    low = max(0.0, 1 - (1 - low) * scale) if low else 0.0
    high = 1 + (high - 1) * scale if high else hp["is_cap"]
    if not low < high:
        raise ObjectiveError(f"{owner}: is_low={low:g} must be below is_high={high:g}")
    if low > 1 or high < 1:
        # 1 is a response that sampler and learner agree on: rejecting it leaves only what they disagree on, or nothing
        raise ObjectiveError(f"{owner}: is_low={low:g}, is_high={high:g} exclude 1, no mismatch at all: use is_low <= 1 <= is_high")
    return {"statistic": statistic, "low": low, "high": high}
