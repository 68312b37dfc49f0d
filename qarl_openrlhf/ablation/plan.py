"""Arms x schemes x seeds -> the train_qarl command of each run.

All runs share one set of flags, but not every objective has every ``--objective.*`` hyperparameter, and train_qarl refuses those
that an objective lacks. So a shared one goes to the arms that have it, and the plan says which arms go without. ``is_statistic``,
``is_low`` and ``is_high`` belong to the mismatch weight ``mis`` and go to the arms with that weight.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from qarl_openrlhf.config import replaces_openrlhfs
from qarl_openrlhf.objectives import PRESETS, ObjectiveError, find_spec
from qarl_openrlhf.objectives.objective import Spec
from qarl_openrlhf.quant import QuantError, QuantScheme
from qarl_openrlhf.report.discover import Identity

HOST_LOSS = "openrlhf"  # the arm with none of our objectives
OURS = ("quant.scheme", "preset", "objective.name", "train.seed", "metrics.dir", "ckpt.output_dir", "ckpt.path", "ckpt.load_enable", "dry_run")
OF_MIS = ("is_statistic", "is_low", "is_high")


class PlanError(ValueError):
    """Arms, schemes or flags that cannot be planned. The message names them and says what would work."""


@dataclass
class PlannedRun:
    """``flags``: the words after ``train_qarl``, all of them."""

    identity: Identity
    directory: Path
    flags: list[str]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", *self.flags]


@dataclass
class Plan:
    """``notes``: what an arm does not share with the others, one line each."""

    runs: list[PlannedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_plan(arms: list[str], schemes: list[str], seeds: list[int], shared: list[str], out: Path, *, rollout_samples: int) -> Plan:
    """All runs, seed by seed, so that a first comparison of all arms is there as early as can be.

    Args:
        arms: preset or objective names, ``path/to/file.py:function``, or ``openrlhf`` for OpenRLHF's own loss.
        shared: flags of train_qarl for every run; rollout_samples: responses a rollout with these flags.
    """
    groups = split_flags(shared)
    taken = sorted({name for name, _ in groups} & set(OURS))
    if taken:
        raise PlanError(f"--{taken[0]} is set for each run: arms, schemes and seeds come from --arms, --schemes, --seeds, directories from --out")
    labels = [label(arm) for arm in arms]
    for what, given, values in (("arm", labels, labels), ("scheme", schemes, list(map(_parsed, schemes))), ("seed", seeds, seeds)):
        if not values:
            raise PlanError(f"no {what} is given")
        if twice := [(given[values.index(v)], given[i]) for i, v in enumerate(values) if v in values[:i]]:
            first, again = twice[0]
            raise PlanError(f"{what} {again} is given twice" + (f", first as {first}" if again != first else ""))
    plan = Plan()
    ours = any(_spec(arm) is not None for arm in arms)
    own = {arm: _arm_flags(arm, groups, rollout_samples, plan.notes, beside_ours=ours) for arm in arms}
    for seed in seeds:
        for scheme in schemes:
            for arm in arms:
                directory = out / label(arm) / scheme.replace(":", "-") / f"seed{seed}"
                flags = [*own[arm], "--quant.scheme", scheme, "--train.seed", str(seed), "--metrics.dir", str(directory)]
                flags += ["--ckpt.output_dir", str(directory / "model"), "--ckpt.path", str(directory / "checkpoints")]
                plan.runs.append(PlannedRun(Identity(label(arm), scheme, seed), directory, flags))
    return plan


def _parsed(scheme: str) -> QuantScheme | str:
    """What two ways of writing a scheme have in common; train_qarl says what is wrong with one that is none."""
    try:
        return QuantScheme.parse(scheme)
    except QuantError:
        return scheme


def label(arm: str) -> str:
    """"path/to/file.py:function" -> "function"; other arms as they are."""
    return arm.rpartition(":")[2] if ".py:" in arm else arm


def split_flags(words: list[str]) -> list[tuple[str, list[str]]]:
    """["--a.b", "1", "2", "--c=3"] -> [("a.b", ["--a.b", "1", "2"]), ("c", ["--c=3"])]; ``--no-x`` counts as x."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            groups.append((name.removeprefix("no-"), [word]))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise PlanError(f"{word!r} belongs to no flag")
    return groups


def _arm_flags(arm: str, groups: list[tuple[str, list[str]]], rollout_samples: int, notes: list[str], *, beside_ours: bool) -> list[str]:
    """The arm's own flags, then the shared ones that it takes; adds to ``notes`` what it goes without.

    beside_ours: whether an arm is an objective of ours.
    """
    spec = _spec(arm)
    flags = [] if spec is None else ["--preset", arm] if arm in PRESETS else ["--objective.name", arm]
    if spec is None and beside_ours:
        flags += _without_kl(arm, groups, notes)
    weight = None if spec is None else _value("objective.is_weight", groups) or spec.hyperparameters["is_weight"].default
    left_out, hosts = [], []
    for name, words in groups:
        hyperparameter = name.removeprefix("objective.")
        if name.startswith("objective.") and not _takes(spec, hyperparameter, weight):
            left_out.append(" ".join(words))
        elif spec is not None and replaces_openrlhfs(name):
            hosts.append(" ".join(words))
        elif spec is not None and spec.on_policy and name in ("train.batch_size", "train.max_epochs"):
            continue
        else:
            flags += words
    if left_out:
        notes.append(f"{label(arm)} goes without {', '.join(left_out)}: it has no such hyperparameter")
    if hosts:
        notes.append(f"{label(arm)} goes without {', '.join(hosts)}: of OpenRLHF's own loss")
    if spec is not None and spec.on_policy:
        flags += ["--train.batch_size", str(rollout_samples), "--train.max_epochs", "1"]
        notes.append(f"{label(arm)} makes one optimizer step a rollout: --train.batch_size {rollout_samples} --train.max_epochs 1")
    return flags


def _without_kl(arm: str, groups: list[tuple[str, list[str]]], notes: list[str]) -> list[str]:
    """train_qarl gives our objectives no KL penalty, and so no reference model, unless one is asked for; the host's loss has one by default."""
    typed = {name for name, _ in groups if name.startswith("algo.kl.")}
    if not typed:
        notes.append(f"{label(arm)} gets --algo.kl.init_coef 0, since the other arms have no KL penalty: give the flag to have one in all")
        return ["--algo.kl.init_coef", "0"]
    if "algo.kl.init_coef" not in typed:
        notes.append(f"{label(arm)} keeps OpenRLHF's KL penalty, and the other arms have none: give --algo.kl.init_coef to have one in all, or 0")
    return []


def _takes(spec: Spec | None, hyperparameter: str, weight: str | None) -> bool:
    if spec is None or hyperparameter not in spec.hyperparameters:
        return False
    return hyperparameter not in OF_MIS or weight == "mis"


def _spec(arm: str) -> Spec | None:
    if arm == HOST_LOSS:
        return None
    try:
        return find_spec(PRESETS[arm]["objective.name"] if arm in PRESETS else arm)
    except ObjectiveError as error:
        raise PlanError(f"--arms {arm}: {error}; presets: {', '.join(PRESETS)}; {HOST_LOSS} is OpenRLHF's own loss") from None


def _value(name: str, groups: list[tuple[str, list[str]]]) -> str | None:
    for flag, words in reversed(groups):
        if flag == name:
            return words[0].partition("=")[2] if "=" in words[0] else words[-1]
    return None
