"""One function a picture; each takes {arm: runs}, returns a matplotlib figure, or None when no run measured it."""

from __future__ import annotations

from matplotlib.figure import Figure  # no pyplot: no global state, no display
from matplotlib.ticker import LogLocator, NullFormatter

from qarl_openrlhf.metrics.writer import PASS_1, accuracies
from qarl_openrlhf.report.runs import Run, mean
from qarl_openrlhf.report.table import PHASES, phase_seconds

ARM_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#000000", "#8c564b", "#7f7f7f", "#bcbd22", "#6a3d9a", "#a6cee3"),
)
PHASE_COLORS = {
    "generation": "#0072b2",
    "old log-probs": "#56b4e9",
    "training": "#d55e00",
    "publish": "#009e73",
    "other": "#bbbbbb",
}
MAX_INSIDE, LEGEND_WIDTH = 5, 1.9  # entries of a legend that stands in a panel; inches of one that stands beside it
OVERLAP = 1.05  # phases that sum to more than this many times the step overlap
MAX_BARS = 100  # bars of more steps are narrower than their edges
Arms = dict[str, list[Run]]


def _figure(panels: int, width: float = 5.4, height: float = 3.6, across: int | None = None) -> tuple[Figure, list]:
    """across: panels in a row at most; default: all of them."""
    columns = min(panels, across or panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, height * rows), dpi=130, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.remove()
    axes = axes[:panels]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def _arm_series(runs: list[Run], name: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, mean, minimum and maximum of a metric over the runs (seeds) of an arm, where any run has it."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, value in zip(*run.series(name)):
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    return steps, *([f(by_step[s]) for s in steps] for f in (mean, min, max))


def _lines(axis, arms: Arms, name: str, *, style: str = "-", label: str = "{arm}") -> bool:
    """One curve an arm; several seeds: their mean, and a band from the lowest to the highest."""
    drawn = False
    for index, (arm, runs) in enumerate(arms.items()):
        steps, centre, low, high = _arm_series(runs, name)
        if not steps:
            continue
        color = ARM_COLORS[index % len(ARM_COLORS)]
        axis.plot(steps, centre, style, color=color, linewidth=1.8, marker="o", markersize=3, label=label.format(arm=arm))
        if len(runs) > 1:
            axis.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
        drawn = True
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    return drawn


def _legend(axis) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) > MAX_INSIDE:  # it would hide the curves
        figure = axis.figure
        if not figure.legends:
            figure.set_figwidth(figure.get_figwidth() + LEGEND_WIDTH)
            figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")
    elif len(labels) > 1:
        axis.legend(fontsize=8, framealpha=0.8, edgecolor="none")


def _log_axis(axis) -> None:
    """A log y axis labelled 0.05, 0.1, 0.2 rather than with powers of ten."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _any(arms: Arms, *names: str) -> bool:
    return any(run.has(name) for runs in arms.values() for run in runs for name in names)


def _shown(arms: Arms, *names: str) -> bool:
    """Whether any of these shares is ever above 0: a panel of zeros says nothing that fits the room it takes."""
    return any(value > 0 for runs in arms.values() for run in runs for name in names for value in run.series(name)[1])


def reward(arms: Arms) -> Figure | None:
    """Mean reward of a step's rollouts."""
    if not _any(arms, "rollout/reward_mean"):
        return None
    figure, (axis,) = _figure(1)
    _lines(axis, arms, "rollout/reward_mean")
    axis.set(title="Reward", ylabel="mean reward of the rollouts")
    _legend(axis)
    return figure


def heldout(arms: Arms) -> Figure | None:
    """Mean reward on held-out prompts (``--eval.dataset``), from the start policy on; a panel a dataset."""
    evaluated = {arm: [Run(run.directory, run.evaluations) for run in runs] for arm, runs in arms.items()}
    names = sorted({name for runs in evaluated.values() for run in runs for row in run.rows for name in accuracies(row)})
    if not names:
        return None
    figure, axes = _figure(len(names), across=4)  # rows may name many sources
    for axis, name in zip(axes, names):
        _lines(axis, evaluated, name)
        dataset = name.removeprefix("eval_").removesuffix(PASS_1).replace("$", r"\$")  # no formula
        axis.set(title="Held-out prompts" + (f" ({dataset})" if len(names) > 1 else ""), ylabel="mean reward of a response")
    _legend(axes[0])
    return figure


def mismatch(arms: Arms) -> Figure | None:
    """How far learner and sampler disagree about sampled tokens: mean |delta log p| (log scale), and the middle 98 % of the
    token probability ratios."""
    if not _any(arms, "mismatch/abs_logp_mean"):
        return None
    with_ratios = _any(arms, "mismatch/ratio_p01")
    figure, axes = _figure(2 if with_ratios else 1)
    _lines(axes[0], arms, "mismatch/abs_logp_mean")
    values = [v for runs in arms.values() for run in runs for v in run.series("mismatch/abs_logp_mean")[1]]
    if min(values) > 0:
        _log_axis(axes[0])
    axes[0].set(title="Learner against sampler, mean |Δ log p| a token", ylabel="nats")
    _legend(axes[0])
    if with_ratios:
        for index, (arm, runs) in enumerate(arms.items()):
            steps, low, _, _ = _arm_series(runs, "mismatch/ratio_p01")
            above, high, _, _ = _arm_series(runs, "mismatch/ratio_p99")
            if steps and steps == above:
                color = ARM_COLORS[index % len(ARM_COLORS)]
                axes[1].fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0, label=arm)
                axes[1].plot(steps, low, color=color, linewidth=1)
                axes[1].plot(steps, high, color=color, linewidth=1)
        axes[1].axhline(1, color="#666666", linewidth=0.8)
        _log_axis(axes[1])
        axes[1].xaxis.get_major_locator().set_params(integer=True)
        axes[1].set(title="Token ratios learner / sampler, 1st to 99th percentile", xlabel="step", ylabel="ratio")
        _legend(axes[1])
    return figure


def mismatch_by_position(arms: Arms) -> Figure | None:
    """Mean |delta log p| by position in the response, over the whole run."""
    prefix = "mismatch/abs_logp_by_position/"
    if not any(run.names(prefix) for runs in arms.values() for run in runs):
        return None
    figure, (axis,) = _figure(1)
    for index, (arm, runs) in enumerate(arms.items()):
        names = sorted({n for run in runs for n in run.names(prefix)}, key=lambda n: int(n.rsplit("/", 1)[1]))
        values = {int(n.rsplit("/", 1)[1]): [v for run in runs for v in run.series(n)[1]] for n in names}
        points = [(position, mean(v)) for position, v in values.items() if v]
        if points:
            axis.plot(*zip(*points), color=ARM_COLORS[index % len(ARM_COLORS)], marker="o", markersize=3, linewidth=1.8, label=arm)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(title="Mismatch by position in the response", xlabel="up to token", ylabel="mean |Δ log p|, nats")
    _legend(axis)
    return figure


def step_time(arms: Arms) -> Figure | None:
    """Seconds by phase: of each step for one run, of the mean step (without the first) for several."""
    runs = [(arm if len(group) == 1 else f"{arm} #{i}", run) for arm, group in arms.items() for i, run in enumerate(group, 1)]
    if not _any(arms, "timing/step_total", *(name for _, name in PHASES)):
        return None
    figure, (axis,) = _figure(1, width=6.4)
    if len(runs) == 1:
        run = runs[0][1]
        bars = [(row["step"], phase_seconds(Run(run.directory, [row]))) for row in run.rows]
        axis.set(title="Step time by phase", xlabel="step", ylabel="seconds")
        axis.xaxis.get_major_locator().set_params(integer=True)
    else:
        bars = [(index, phase_seconds(run)) for index, (_, run) in enumerate(runs)]
        axis.set_xticks(range(len(runs)), [name for name, _ in runs])
        axis.set(title="Mean step time by phase (first step left out)", ylabel="seconds")
    _phases(axis, [p for p, _ in bars], [seconds for _, seconds in bars], of_one_run=len(runs) == 1)
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right upper")
    return figure


def _phases(axis, positions: list[int], seconds: list[dict[str, float]], *, of_one_run: bool) -> None:
    """A stack of phases at each position. Where they overlap, as in asynchronous runs, a stack would be taller than the step: the
    phases stand beside each other then (a curve each, in one run), with the step's own time."""
    heights = {phase: [each.get(phase, 0.0) for each in seconds] for phase in PHASE_COLORS}
    heights = {phase: values for phase, values in heights.items() if any(values)}
    timed = [(sum(v for phase, v in each.items() if phase != "step"), each["step"]) for each in seconds if "step" in each]
    # Of one run as a whole: single steps of a synchronous run may be measured badly.
    pairs = [tuple(map(sum, zip(*timed)))] if of_one_run and timed else timed
    if any(together > OVERLAP * step for together, step in pairs):
        step_times = [each.get("step", float("nan")) for each in seconds]
        for index, (phase, values) in enumerate(heights.items()):
            if of_one_run:
                axis.plot(positions, values, color=PHASE_COLORS[phase], linewidth=1.4, label=phase)
            else:
                width = 0.8 / len(heights)
                places = [p - 0.4 + (index + 0.5) * width for p in positions]
                axis.bar(places, values, color=PHASE_COLORS[phase], label=phase, width=width)
        style = {"linewidth": 1.8} if of_one_run else {"linestyle": "none", "marker": "_", "markersize": 22, "markeredgewidth": 2}
        axis.plot(positions, step_times, color="black", label="step (phases overlap)", **style)
        axis.set_ylim(bottom=0)
        return
    if len(positions) > MAX_BARS:
        axis.stackplot(positions, *heights.values(), colors=[PHASE_COLORS[p] for p in heights], labels=list(heights), step="mid", linewidth=0)
        return
    bottom = [0.0] * len(positions)
    for phase, values in heights.items():
        # A thin white edge keeps neighbouring phases apart.
        axis.bar(positions, values, bottom=bottom, color=PHASE_COLORS[phase], label=phase, width=0.8, edgecolor="white", linewidth=0.5)
        bottom = [b + h for b, h in zip(bottom, values)]


def entropy(arms: Arms) -> Figure | None:
    """Entropy of the policy: the learner's, or the estimate from sampled tokens where only that was measured."""
    name = next((n for n in ("policy/entropy", "policy/entropy_sampled") if _any(arms, n)), None)
    if name is None:
        return None
    figure, (axis,) = _figure(1)
    _lines(axis, arms, name)
    axis.set(title="Entropy" + (" (from sampled tokens)" if name.endswith("sampled") else ""), ylabel="nats a token")
    _legend(axis)
    return figure


def error_tokens(arms: Arms) -> Figure | None:
    """Share of very unlikely and of repeated tokens, by sign of the response's advantage."""
    panels = (("error_token/low_prob_rate", "Low-probability tokens"), ("error_token/repeat_rate", "Repeated tokens"))
    panels = [(name, title) for name, title in panels if _shown(arms, name, f"{name}_pos", f"{name}_neg")]
    if not panels:
        return None
    figure, axes = _figure(len(panels))
    for axis, (name, title) in zip(axes, panels):
        _by_sign(axis, arms, name)
        axis.set(title=title, ylabel="share of tokens")
        axis.set_ylim(bottom=0)
        _legend(axis)
    return figure


def _by_sign(axis, arms: Arms, name: str) -> None:
    """``name`` with _pos (solid) and _neg (dashed) where a run has them, else the whole."""
    signs = ((f"{name}_pos", "A > 0", "-"), (f"{name}_neg", "A < 0", "--"))
    if not _any(arms, *(each for each, _, _ in signs)):
        _lines(axis, arms, name)
        return
    for each, sign, style in signs:
        _lines(axis, arms, each, style=style, label="{arm}, " + sign)


def in_band(arms: Arms) -> Figure | None:
    """Share of responses whose update is not cut by the objective's band, by sign of the advantage."""
    name = "objective/in_band_frac"
    if not _any(arms, name, f"{name}_pos", f"{name}_neg"):
        return None
    figure, (axis,) = _figure(1)
    _by_sign(axis, arms, name)
    axis.set_ylim(-0.02, 1.02)
    axis.set(title="Responses inside the trust band", ylabel="share of responses")
    _legend(axis)
    return figure


def changed_codes(arms: Arms) -> Figure | None:
    """Share of the quantized weights' codes that changed from one publish to the next."""
    if not _shown(arms, "sync/changed_code_frac"):
        return None
    figure, (axis,) = _figure(1)
    _lines(axis, arms, "sync/changed_code_frac")
    axis.set(title="Codes changed by a publish", ylabel="share of codes")
    axis.set_ylim(bottom=0)
    _legend(axis)
    return figure


def clipping(arms: Arms) -> Figure | None:
    """Share of an objective's units outside each side of the band, over time; sides that none is ever outside of are left out."""
    sides = (("pos_clip_frac", "A > 0, outside"), ("neg_low_frac", "A < 0, below"), ("neg_high_frac", "A < 0, above"))
    sides = [(f"objective/{name}", title) for name, title in sides if _shown(arms, f"objective/{name}")]
    if not sides:
        return None
    figure, axes = _figure(len(sides), width=4.2)
    for axis, (name, title) in zip(axes, sides):
        _lines(axis, arms, name)
        axis.set(title=title, ylabel="share of the units")
        axis.set_ylim(bottom=0)
    _legend(axes[0])
    return figure


def weights(arms: Arms) -> Figure | None:
    """Effective sample size of the mismatch weights, and how many of them are capped or rejected."""
    panels = []
    if _any(arms, "is/ess"):
        panels.append(("is/ess", "Effective sample size of the mismatch weights", "fraction of the units"))
    if _shown(arms, "is/clip_frac"):
        panels.append(("is/clip_frac", "Weights capped, clamped or rejected", "share of the units"))
    if not panels:
        return None
    figure, axes = _figure(len(panels))
    for axis, (name, title, label) in zip(axes, panels):
        _lines(axis, arms, name)
        axis.set(title=title, ylabel=label)
    _legend(axes[0])
    return figure


def kl(arms: Arms) -> Figure | None:
    """How far the policy is from the start policy, and the learner from the sampler."""
    panels = (
        ("policy/kl_start", "KL(start policy || policy), a token of the start policy's"),
        ("mismatch/k3", "KL(sampler || learner), a sampled token"),
    )
    panels = [(name, title) for name, title in panels if _any(arms, name)]
    if not panels:
        return None
    figure, axes = _figure(len(panels))
    for axis, (name, title) in zip(axes, panels):
        _lines(axis, arms, name)
        values = [v for runs in arms.values() for run in runs for v in run.series(name)[1]]
        if min(values) > 0:
            _log_axis(axis)
        axis.set(title=title, ylabel="nats")
        axis.title.set_fontsize(9)
    _legend(axes[0])
    return figure


PLOTS = {
    "reward": reward,
    "heldout": heldout,
    "mismatch": mismatch,
    "mismatch_by_position": mismatch_by_position,
    "step_time": step_time,
    "in_band": in_band,
    "changed_codes": changed_codes,
    "entropy": entropy,
    "error_tokens": error_tokens,
    "clipping": clipping,
    "weights": weights,
    "kl": kl,
}
