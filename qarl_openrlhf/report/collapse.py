"""Did a run collapse, and why do we say so? Rules that look at the curves only, so that every arm is judged alike."""

from __future__ import annotations

import math

from qarl_openrlhf.report.runs import Run, mean
from qarl_openrlhf.report.table import EDGE

MUST_BE_FINITE = ("rollout/reward_mean", "policy_loss", "actor_grad_norm")
ERROR_TOKENS = (("error_token/repeat_rate", "repeated"), ("error_token/low_prob_rate", "under 1e-3"))
LOST_GAIN = 0.5  # share of the gain that a collapsed run has lost again
GARBLED = 0.5  # share of error tokens in the last steps of a garbled policy
SURE = 3.0  # standard errors, of a difference between two means


def smoothed(values: list[float], window: int = EDGE) -> list[float]:
    """Running means of `window` values (of all, where there are fewer)."""
    window = max(1, min(window, len(values)))
    return [mean(values[i : i + window]) for i in range(len(values) - window + 1)]


def collapse_reason(run: Run) -> str | None:
    """One line with the figures, or None for a run that did not collapse. In this order:

    1. a loss, gradient norm or reward that is not finite (null in metrics.jsonl);
    2. error tokens: over half of the last steps' tokens repeat an earlier 4-gram, or had a probability under 1e-3, and
       more than twice as many as in the first steps;
    3. reward, by means of five steps: more than half of the best gain over the first steps is lost again, or the end lies
       below the beginning, either by more than three standard errors of such a difference (of the loss of a gain in more than
       20 steps: somewhat more, see `sure_of_best`).
    """
    for name in MUST_BE_FINITE:
        bad = [row["step"] for row in run.rows if name in row and row[name] is None]
        if bad:
            return f"{name} is not finite in step {bad[0]}"
    for name, what in ERROR_TOKENS:
        values = run.series(name)[1]
        if len(values) > 1:
            first, last = mean(values[:EDGE]), mean(values[-EDGE:])
            if last > GARBLED and last > 2 * first:
                return f"{last:.0%} of the last steps' tokens are {what} ({first:.0%} at the beginning)"
    return _reward_fell(run.series("rollout/reward_mean")[1])


def sure_of_best(steps: int) -> float:
    """Standard errors by which the end must lie below the best of so many steps: with them grow the chances of a mean that noise
    alone lifts. The 1.5 is by simulation: 2 % of runs of pure noise are called collapsed, of 20 steps as of 10000."""
    return math.sqrt(SURE**2 + 1.5 * math.log(max(1.0, steps / 20)))


def _reward_fell(rewards: list[float]) -> str | None:
    if len(rewards) < 2 * EDGE:
        return None  # too short for means of five steps at both ends
    means = smoothed(rewards)
    first, last = means[0], means[-1]
    peak = max(range(len(means)), key=means.__getitem__)
    gain, lost = means[peak] - first, means[peak] - last
    # Noise from step to step, over the whole run: five steps alone would estimate it badly.
    jumps = [(later - earlier) ** 2 for earlier, later in zip(rewards, rewards[1:])]
    noise = math.sqrt(mean(jumps) / 2) * math.sqrt(2 / EDGE)
    if gain > 0 and lost > LOST_GAIN * gain and lost > sure_of_best(len(rewards)) * noise:
        at = f"a best of {means[peak]:.3f} (steps {peak + 1} to {peak + EDGE})"
        return f"reward fell from {at} to {last:.3f}: {lost / gain:.0%} of the gain since the start ({first:.3f}) is lost"
    if first - last > SURE * noise:
        return f"reward fell from {first:.3f} at the start to {last:.3f}"
    return None
