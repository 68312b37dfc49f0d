"""The flags of a run that decide how it goes on, as its checkpoints keep them."""

import json
from pathlib import Path

# Where the run is, what it prints, writes and checks, how long it waits: none of it changes a weight.
WITHOUT_EFFECT = ("ckpt.", "logger.", "metrics.", "ray.", "sync.", "dry_run", "verbose", "preset", "local_rank")
WITHOUT_EFFECT += ("quant.cache", "eval.steps", "reward.timeout_s", "objective.hyperparameters")
MODELS = ("actor.model_name_or_path", "critic.model_name_or_path")
LISTED = 12


def flatten(args, prefix: str = "") -> list[tuple[str, object]]:
    """Nested namespace -> sorted (dotted name, value)."""
    rows = []
    for name, value in sorted(vars(args).items()):
        rows += flatten(value, f"{prefix}{name}.") if hasattr(value, "__dict__") else [(prefix + name, value)]
    return rows


def deciding(flags: dict) -> dict:
    """Those of {dotted name: value} that a resumed run is compared by, as JSON gives them back."""
    chosen = {name: value for name, value in flags.items() if not name.startswith(WITHOUT_EFFECT)}
    if chosen.get("model.max_positions") is not None or chosen.get("model.rope_theta") is not None:
        for name in MODELS:  # a directory in the run's own, made when the run starts
            chosen.pop(name, None)
    roles = ["actor", "critic"] if chosen.get("critic.model_name_or_path") else ["actor"]
    if all(chosen.get(f"{role}.lr_scheduler") == "constant" for role in roles):
        chosen.pop("train.num_episodes", None)  # it ends the other learning rates' schedules
    return json.loads(json.dumps(chosen, default=str))


def of_run(directory: str) -> dict:
    """The same from the ``run.json`` of a run directory; {} if there is none that can be read."""
    try:
        return deciding(json.loads((Path(directory) / "run.json").read_text(encoding="utf-8"))["flags"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def changes(before: dict, now: dict) -> list[str]:
    """"--train.seed 0 -> 7" for each flag that both have, with other values."""
    differing = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    listed = [f"--{name} {_shown(before[name])} -> {_shown(now[name])}" for name in differing[:LISTED]]
    return listed + ([f"{len(differing) - LISTED} more"] if len(differing) > LISTED else [])


def _shown(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
