"""From measured pieces to a step: figures at full depth, the assembled time, its ratio to BF16, the tables."""

import statistics

from rich.console import Console
from rich.table import Table

from qarl_openrlhf.bench.step_clock import OLD, OPTIMIZER, OTHER, QUANTIZE, TRAIN
from qarl_openrlhf.bench.step_fit import Line, full_depth
from qarl_openrlhf.bench.step_plan import engine_scheme, learner_scheme
from qarl_openrlhf.bench.step_workload import Workload

ROLLOUT, PUSH = "rollout", "push"
COLUMNS = (ROLLOUT, OLD, TRAIN, OPTIMIZER, QUANTIZE, OTHER, PUSH)
TOKEN_PHASES, UPDATE_PHASES = (OLD, TRAIN, OTHER), (OPTIMIZER, QUANTIZE)
_HEADINGS = {OLD: "old logp", TRAIN: "fwd + bwd"}
FORMULA = (
    "colocated step = rollout + old log-probs + forward and backward + other + updates x optimizer + (updates - 1) x quantize "
    "+ push; the push quantizes once itself. async step = max(rollout, the learner's phases) + push"
)


def unit_seconds(piece: dict, phase: str) -> float:
    """Of a learner's piece: seconds a token, of an optimizer step, or of quantizing once; the median of its runs, of two the less.

    Each phase by itself: a stall in one run, as the first after a start may meet, then moves nothing. A measured rollout of n
    updates quantizes n - 1 times: it begins with the weights of the last publish.
    """
    seconds = statistics.median_low(run[phase] for run in piece["runs"])
    if phase in TOKEN_PHASES:
        return seconds / piece["tokens"]
    return seconds / (piece["updates"] if phase == OPTIMIZER else piece["updates"] - 1)


def learner_at_full_depth(pieces: dict, scheme: str, kind: str, depth: int) -> dict[str, tuple[float, Line | None]]:
    """{phase: (unit seconds at full depth, line)} of a scheme; {} while neither three depths nor the full one are measured."""
    head = f"learner/{learner_scheme(scheme)}/{kind}/"
    measured = {int(name.removeprefix(head)): piece for name, piece in pieces.items() if name.startswith(head)}
    if len(measured) < 3 and depth not in measured:
        return {}
    return {
        phase: full_depth({layers: unit_seconds(piece, phase) for layers, piece in measured.items()}, depth)
        for phase in (*TOKEN_PHASES, *UPDATE_PHASES)
    }


def rollout_seconds(pieces: dict, scheme: str, kind: str, depth: int) -> float | None:
    """Measured at full depth, or on the line of three depths; None without."""
    head = f"rollout/{engine_scheme(scheme)}/{kind}/"
    points = {int(name.removeprefix(head)): piece["seconds"] for name, piece in pieces.items() if name.startswith(head)}
    return full_depth(points, depth)[0] if depth in points or len(points) >= 3 else None


def push_seconds(pieces: dict, scheme: str, depth: int) -> float | None:
    head = f"push/{engine_scheme(scheme)}/"
    points = {int(name.removeprefix(head)): piece["total_ms"] / 1e3 for name, piece in pieces.items() if name.startswith(head)}
    return full_depth(points, depth)[0] if depth in points or len(points) >= 3 else None


def assemble(pieces: dict, scheme: str, kind: str, workload: Workload, depth: int) -> dict[str, float | None]:
    """Seconds of each phase of one GPU's step (None: not measured), and "colocated" and "async" where all are there."""
    tokens, updates = workload.tokens(kind), workload.updates
    times = {phase: value for phase, (value, _) in learner_at_full_depth(pieces, scheme, kind, depth).items()}
    step: dict[str, float | None] = {ROLLOUT: rollout_seconds(pieces, scheme, kind, depth)}
    for phase in TOKEN_PHASES:
        step[phase] = times[phase] * tokens if times else None
    step[OPTIMIZER] = times[OPTIMIZER] * updates if times else None
    step[QUANTIZE] = times[QUANTIZE] * (updates - 1) if times else None
    step[PUSH] = push_seconds(pieces, scheme, depth)
    step = {name: step[name] for name in COLUMNS}
    whole = all(value is not None for value in step.values())
    learner = sum(step[name] for name in COLUMNS if name not in (ROLLOUT, PUSH)) if whole else None
    step["colocated"] = sum(step[name] for name in COLUMNS) if whole else None
    step["async"] = max(step[ROLLOUT], learner) + step[PUSH] if whole else None
    return step


def ratios(steps: dict[str, dict], name: str) -> dict[str, float]:
    """Scheme -> how many times faster than bf16 in this column; {} without bf16."""
    base = steps.get("bf16", {}).get(name)
    return {scheme: base / step[name] for scheme, step in steps.items() if base and step[name]}


def bound(model, scheme: str, kind: str, card: str, workload: Workload, optimizer: str) -> dict[str, float]:
    """Roofline seconds of each phase; {} for a card that has no data sheet here."""
    bounds = model.bounds(scheme, card)
    if bounds is None:
        return {}
    lengths = workload.lengths(kind)
    whole = [workload.prompt + n for n in lengths]
    quantize = bounds.quantize(copy=bounds.scheme.activation_format == "bf16") if bounds.scheme.aligned else 0.0
    return {
        ROLLOUT: bounds.rollout(workload.prompts, workload.samples, workload.prompt, lengths),
        OLD: bounds.forward(whole),
        TRAIN: bounds.forward_backward(whole),
        OPTIMIZER: bounds.optimizer(optimizer) * workload.updates,
        QUANTIZE: quantize * (workload.updates - 1),
        PUSH: bounds.push(),
    }


def step_table(title: str, steps: dict[str, dict], bounds: dict[str, dict]) -> Table:
    """Seconds by scheme and phase, measured (and the roofline's in brackets)."""
    table = Table(title=title, title_justify="left")
    for name in ("scheme", *COLUMNS, "colocated", "x bf16", "async", "x bf16"):
        table.add_column(_HEADINGS.get(name, name), justify="left" if name == "scheme" else "right", no_wrap=name == "scheme")
    colocated, overlapped = ratios(steps, "colocated"), ratios(steps, "async")
    for scheme, step in steps.items():
        cells = [_cell(step[name], bounds.get(scheme, {}).get(name)) for name in COLUMNS]
        cells += [_cell(step["colocated"]), _ratio(colocated.get(scheme)), _cell(step["async"]), _ratio(overlapped.get(scheme))]
        table.add_row(scheme, *cells)
    return table


def fit_table(title: str, lines: dict[str, dict[str, tuple[float, Line | None]]]) -> Table:
    """The learner's lines in the number of layers, by scheme: microseconds a token, milliseconds an update."""
    table = Table(title=title, title_justify="left")
    for name in ("scheme", "phase", "unit", "fixed", "a layer", "residual", "at full depth"):
        table.add_column(name, justify="left" if name in ("scheme", "phase", "unit") else "right")
    for scheme, phases in lines.items():
        for phase, (value, line) in phases.items():
            unit, scale = ("us a token", 1e6) if phase in TOKEN_PHASES else ("ms", 1e3)
            if line is None:
                table.add_row(scheme, phase, unit, "-", "-", "measured", f"{value * scale:.4g}")
            elif line.fixed or line.per_layer:
                table.add_row(
                    scheme, phase, unit, f"{line.fixed * scale:.4g}", f"{line.per_layer * scale:.4g}", f"{line.residual:.1%}",
                    f"{value * scale:.4g}",
                )  # fmt: skip
    return table


def show(table: Table) -> None:
    Console(width=None if Console().is_terminal else 200).print(table)


def _cell(value: float | None, least: float | None = None) -> str:
    measured = "-" if value is None else _short(value)
    return measured if least is None else f"{measured} ({_short(least)})"


def _short(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
