"""summary.csv (a row a run) and summary.md (a row an arm, mean and spread over its seeds) of a set of runs."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.metrics.writer import accuracies
from qarl_openrlhf.report.collapse import collapse_reason, smoothed
from qarl_openrlhf.report.discover import Entry
from qarl_openrlhf.report.runs import mean
from qarl_openrlhf.report.table import EDGE, phase_seconds

# Column -> (metric, title in summary.md, format); the mean of the last five steps.
LAST = {
    "kl_start": ("policy/kl_start", "KL to start", "{:.4f}"),
    "mismatch": ("mismatch/abs_logp_mean", "mismatch", "{:.4f}"),
    "low_prob_rate": ("error_token/low_prob_rate", "low-prob. tokens", "{:.2%}"),
    "repeat_rate": ("error_token/repeat_rate", "repeated tokens", "{:.2%}"),
    "entropy": ("policy/entropy_sampled", "entropy", "{:.3f}"),
    "in_band": ("objective/in_band_frac", "in band", "{:.0%}"),
}
SPREAD = {
    "final_reward": ("final reward", "{:.3f}"),
    "best_reward": ("best reward", "{:.3f}"),
    "start_heldout": ("held-out, start", "{:.3f}"),
    "final_heldout": ("held-out, later half", "{:.3f}"),
    "heldout_gain": ("held-out, gain", "{:+.3f}"),
    **{c: (t, f) for c, (_, t, f) in LAST.items()},
    "step_seconds": ("s a step", "{:.1f}"),
}
WHOLE = ("finished", "unknown")  # states of runs whose last steps are taken for their end


def row(entry: Entry) -> dict:
    """The run's line of summary.csv; figures that it did not measure are None."""
    identity, run = entry.identity, entry.run
    figures = {"objective": identity.objective, "scheme": identity.scheme, "seed": identity.seed}
    figures["status"] = entry.state
    rewards = run.series("rollout/reward_mean")[1] if run else []
    reason = (collapse_reason(run) if run else None) or entry.failure
    figures |= {
        "steps": len(run.rows) if run else 0,
        "first_reward": mean(rewards[:EDGE]) if rewards else None,
        "final_reward": mean(rewards[-EDGE:]) if rewards else None,
        "best_reward": max(smoothed(rewards)) if rewards else None,
    }
    heldout = {e["step"]: mean([e[name] for name in accuracies(e)]) for e in (run.evaluations if run else []) if accuracies(e)}
    # One evaluation has the noise of one step: all of the later half.
    first, last = heldout.get(0), mean([value for step, value in heldout.items() if 2 * step >= max(heldout) + 1]) if heldout.keys() - {0} else None
    figures |= {"start_heldout": first, "final_heldout": last, "heldout_gain": None if None in (first, last) else last - first}
    for column, (metric, _, _) in LAST.items():
        values = run.series(metric)[1][-EDGE:] if run else []
        figures[column] = mean(values) if values else None
    figures["step_seconds"] = phase_seconds(run).get("step") if run else None
    figures["collapsed"] = "" if run is None else "yes" if collapse_reason(run) else "no"
    figures["reason"] = reason or ""
    figures["directory"] = str(entry.directory)
    return figures


def write_summary(entries: list[Entry], out: Path) -> list[Path]:
    """Writes summary.csv and summary.md into `out`; returns their paths."""
    rows = [row(entry) for entry in entries]
    with atomic_file(out / "summary.csv") as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows)
    with atomic_file(out / "summary.md") as part:
        part.write_text(markdown(rows), encoding="utf-8")
    return [out / "summary.csv", out / "summary.md"]


def markdown(rows: list[dict]) -> str:
    """A table by arm, its collapses and failures with their reasons, and which arms can be told apart."""
    arms: dict[tuple[str, str], list[dict]] = {}
    for r in rows:
        arms.setdefault((r["objective"], r["scheme"]), []).append(r)
    whole = {arm: [r for r in group if r["status"] in WHOLE] for arm, group in arms.items()}
    columns = [c for c in SPREAD if any(r[c] is not None for r in rows)]
    lines = [
        "Mean ± standard deviation over seeds. Rewards: mean of the last five steps (final), best running mean of five steps; "
        "held-out: mean reward in the evaluation of the start policy and in those of the later half of the steps, and their difference; the other "
        "figures are means of the last five steps, seconds those of all steps but the first.",
        "",
        "| objective | scheme | seeds | steps | " + " | ".join(SPREAD[c][0] for c in columns) + " | collapsed |",
        "|---|---|---|---|" + "---|" * (len(columns) + 1),
    ]
    for (objective, scheme), group in arms.items():
        shown = whole[objective, scheme] or group
        cells = [_with_spread([r[c] for r in shown if r[c] is not None], SPREAD[c][1]) for c in columns]
        steps = "/".join(dict.fromkeys(str(r["steps"]) for r in group))
        collapsed = sum(r["collapsed"] == "yes" for r in group)
        failed = sum(r["status"] == "failed" for r in group)
        verdict = f"{collapsed} of {len(group)}" + (f", {failed} failed" if failed else "")
        lines.append(f"| {objective} | {scheme} | {len(group)} | {steps} | " + " | ".join(cells) + f" | {verdict} |")
    lines += _left_out(arms, whole)
    told = [f"- {r['objective']} {r['scheme']} seed {r['seed']}, {r['status']}: {r['reason']}" for r in rows if r["reason"]]
    if told:
        lines += ["", "Collapsed or failed:", "", *told]
    lines += ["", *_comparison(whole)]
    return "\n".join(lines) + "\n"


def _left_out(arms: dict[tuple[str, str], list[dict]], whole: dict[tuple[str, str], list[dict]]) -> list[str]:
    """Which runs with steps are in no mean, and which arms' figures are those of runs that have not come to their end."""
    apart, only = [], []
    for arm, group in arms.items():
        begun = [f"seed {r['seed']}, {r['status']} at {r['steps']} steps" for r in group if r["steps"] and r["status"] not in WHOLE]
        if begun:
            (apart if whole[arm] else only).append(f"- {' '.join(arm).strip()}: {'; '.join(begun)}")
    lines = ["", "Left out of the means and of the comparison, not being finished:", "", *apart] if apart else []
    if only:
        lines += ["", "No run of these arms is finished: their figures are those of the runs so far, and are not compared:", "", *only]
    return lines


def _comparison(arms: dict[tuple[str, str], list[dict]]) -> list[str]:
    """For each scheme: the arm with the highest final reward, and how far the others are from it in standard errors.

    The spread is that between seeds (pooled over the arms, which have two or three seeds each); where it hides the difference,
    the number of seeds that would show it at two standard errors.
    """
    lines = []
    for scheme in dict.fromkeys(scheme for _, scheme in arms):
        finals = {o: [r["final_reward"] for r in group if r["final_reward"] is not None] for (o, s), group in arms.items() if s == scheme}
        finals = {o: values for o, values in finals.items() if values}
        freedom = sum(len(values) - 1 for values in finals.values())
        if len(finals) < 2 or freedom < 1:
            continue
        pooled = math.sqrt(sum((v - mean(values)) ** 2 for values in finals.values() for v in values) / freedom)
        best = max(finals, key=lambda o: mean(finals[o]))
        lines += [f"{scheme}: highest final reward {best}; standard deviation between seeds {pooled:.3f} ({freedom} degrees of freedom).", ""]
        for objective, values in finals.items():
            if objective == best:
                continue
            gap = mean(finals[best]) - mean(values)
            error = pooled * math.sqrt(1 / len(values) + 1 / len(finals[best]))
            if error and gap >= 2 * error:
                lines.append(f"- {objective}: {gap:.3f} lower, {gap / error:.1f} standard errors")
            elif not gap or not error:
                lines.append(f"- {objective}: {gap:.3f} lower, no telling")
            else:
                seeds = math.ceil(8 * (pooled / gap) ** 2)
                lines.append(f"- {objective}: {gap:.3f} lower, {gap / error:.1f} standard errors: not told apart; {seeds} seeds each would do")
        lines.append("")
    return lines


def _with_spread(values: list[float], form: str) -> str:
    if not values:
        return "-"
    text = form.format(mean(values))
    if len(values) > 1:
        centre = mean(values)
        text += " ± " + form.replace("+", "").format(math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1)))
    return text
