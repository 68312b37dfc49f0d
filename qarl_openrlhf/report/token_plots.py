"""Pictures of the token histograms: one row an arm, A < 0 left and A > 0 right, counts over the whole run.

Each takes {arm: runs} and returns a figure, or None when there is nothing to draw: no run has histograms.jsonl, or none of its
tokens is what the picture is about. A side that has nothing in any arm is left out.
"""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from qarl_openrlhf.report.histograms import Histograms, total_of
from qarl_openrlhf.report.runs import Run

Arms = dict[str, list[Run]]
SIDES = ((0, "A < 0"), (2, "A > 0"))
# From rare to sure tokens; the first are the error tokens.
PROB_COLORS = ("#b2182b", "#ef8a62", "#e6ab02", "#7fbc41", "#67a9cf", "#2166ac")
REGION_COLORS = {"below": "#2166ac", "above": "#b2182b", "rejected": "#555555"}


Panels = list[tuple]  # (axis, counts of one arm and side, Histograms)


def _grid(arms: Arms, name: str, title: str, counted=lambda counts, histograms: counts) -> tuple[Figure, Panels] | None:
    """A row an arm, a column a side. ``counted``: of an arm's counts, what the picture is about; None or no row without any."""
    found = {}
    for arm, runs in arms.items():
        total = total_of(runs, name)
        if total is not None and counted(*total)[[sign for sign, _ in SIDES]].any():
            found[arm] = total
    sides = [(sign, label) for sign, label in SIDES if any(counted(*total)[sign].any() for total in found.values())]
    if not sides:
        return None
    figure = Figure(figsize=(5.2 * len(sides), 2.7 * len(found) + 0.6), dpi=130, layout="constrained")
    axes = figure.subplots(len(found), len(sides), squeeze=False, sharex=True, sharey=True)
    panels = []
    for row, (arm, (counts, histograms)) in zip(axes, found.items()):
        for axis, (sign, label) in zip(row, sides):
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(f"{arm}, {label}", fontsize=9)
            panels.append((axis, counts[sign], histograms))
    figure.suptitle(title, fontsize=11)
    return figure, panels


def _prob_names(histograms: Histograms) -> list[str]:
    edges = histograms.bins["old_prob"]
    return [f"p ≤ {edges[0]:g}", *(f"{a:g} to {b:g}" for a, b in zip(edges, edges[1:])), f"p > {edges[-1]:g}"]


def _on_log_ratios(
    arms: Arms, name: str, title: str, draw, *, xlabel: str | None = None, what: str = "tokens"
) -> tuple[Figure, Panels] | None:
    """Panels over a symmetric log axis of log-ratios; ``draw(axis, counts, edges, histograms)`` fills one."""
    made = _grid(arms, name, title)
    if made is None:
        return None
    for axis, counts, histograms in made[1]:
        inner = np.array(histograms.bins["log_ratio"])
        draw(axis, counts, np.concatenate([[2 * inner[0]], inner, [2 * inner[-1]]]), histograms)
        axis.set_xscale("symlog", linthresh=1e-5, linscale=0.5)
        axis.set_xticks([-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1], ["-1", "-0.01", "-1e-4", "0", "1e-4", "0.01", "1"], fontsize=7)
        axis.set_xticks([], minor=True)
        axis.set_xlabel(xlabel, fontsize=8)
        axis.set_ylabel(f"share of {what}", fontsize=8)
    return made


def _by_probability(arms: Arms, name: str, title: str, xlabel: str) -> Figure | None:
    """A curve for each bin of the old probability, as shares of the side's tokens."""

    def draw(axis, counts, edges, histograms) -> None:
        for row, color, prob in zip(counts, PROB_COLORS, _prob_names(histograms)):
            if row.any():
                axis.stairs(row / counts.sum(), edges, color=color, linewidth=1.4, label=prob)
        axis.set_yscale("log")

    made = _on_log_ratios(arms, name, title, draw, xlabel=xlabel)
    if made is None:
        return None
    _shared_legend(*made, "old probability")
    return made[0]


def _shared_legend(figure: Figure, panels: Panels, title: str | None = None) -> None:
    handles = {}
    for axis, *_ in panels:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), title=title, fontsize=8, title_fontsize=8, loc="outside right upper", frameon=False)


def ratio_histogram(arms: Arms) -> Figure | None:
    """How far updates moved tokens, by how probable they were."""
    return _by_probability(arms, "ratio", "Token ratios, current against old policy (all updates)", "log π current - log π old, nats")


def mismatch_histogram(arms: Arms) -> Figure | None:
    """How far learner and sampler disagree about tokens, by how probable they are."""
    return _by_probability(arms, "mismatch", "Token ratios, learner against sampler", "log π learner - log π sampler, nats")


def weight_histogram(arms: Arms) -> Figure | None:
    """The objective's mismatch weight of each token."""
    return _by_probability(arms, "weight", "Mismatch weights (leftmost: weight 0)", "log w")


def old_against_current(arms: Arms) -> Figure | None:
    """Each token's old and current probability: off the diagonal lie the tokens that updates moved."""
    made = _grid(arms, "old_current", "Probability of a token before and after updates")
    if made is None:
        return None
    figure, panels = made
    image = None
    for axis, counts, histograms in panels:
        edges = np.array([1e-7, *histograms.bins["prob"], 0.9999])
        shown = np.ma.masked_equal(counts.T, 0)
        image = axis.pcolormesh(edges, edges, shown, norm=LogNorm(1, max(2, counts.max())), cmap="viridis")
        axis.plot(edges, edges, color="#999999", linewidth=0.8)
        axis.set(xscale="logit", yscale="logit")
        ticks = [1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999]
        for which in (axis.set_xticks, axis.set_yticks):
            which(ticks, [f"{t:g}" for t in ticks], fontsize=7)
            which([], minor=True)
        axis.set_xlabel("old probability", fontsize=8)
        axis.set_ylabel("current probability", fontsize=8)
    figure.colorbar(image, ax=[axis for axis, *_ in panels], label="tokens")
    return figure


def regions(arms: Arms) -> Figure | None:
    """Which tokens are outside their band: share of the tokens of each old probability."""

    def outside(counts, histograms):
        return counts[..., [histograms.bins["region"].index(region) for region in REGION_COLORS]]

    made = _grid(arms, "region", "Tokens outside the band, by old probability", outside)
    if made is None:
        return None
    figure, panels = made
    for axis, counts, histograms in panels:
        totals = np.maximum(counts.sum(-1), 1)
        bottom = np.zeros(len(totals))
        for (region, color), here in zip(REGION_COLORS.items(), outside(counts, histograms).T):
            axis.bar(range(len(totals)), here / totals, bottom=bottom, color=color, label=region, width=0.8)
            bottom += here / totals
        axis.set_xticks(range(len(totals)), _prob_names(histograms), fontsize=7)
        axis.set_ylabel("share of tokens", fontsize=8)
        axis.set_ylim(bottom=0)
    _shared_legend(figure, panels)
    return figure


def response_ratios(arms: Arms) -> Figure | None:
    """Mean log-ratio of whole responses: what sequence bands are drawn on."""

    def draw(axis, counts, edges, histograms) -> None:
        axis.stairs(counts / max(1, counts.sum()), edges, color="#2166ac", fill=True, alpha=0.6)

    made = _on_log_ratios(arms, "seq_ratio", "Responses: mean of log π current - log π old", draw, what="responses")
    return made and made[0]


TOKEN_PLOTS = {
    "ratio_histogram": ratio_histogram,
    "mismatch_histogram": mismatch_histogram,
    "weight_histogram": weight_histogram,
    "response_ratios": response_ratios,
    "old_against_current": old_against_current,
    "regions": regions,
}
