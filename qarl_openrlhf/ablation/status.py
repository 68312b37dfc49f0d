"""status.json of a run: what was asked of it and how far it came, so that a second call goes on where the first one stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path

from qarl_openrlhf.ablation.plan import PlannedRun, PlanError
from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.report.discover import STATUS, Entry, Identity, entry

FINISHED, FAILED, RUNNING = "finished", "failed", "running"


def read_status(directory: Path) -> dict | None:
    """What ``write_status`` wrote; PlanError when something else is there."""
    path = directory / STATUS
    if not path.is_file():
        return None
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        status = None
    if not isinstance(status, dict) or not isinstance(status.get("flags"), list) or "state" not in status:
        raise PlanError(f"{path} is broken: remove {directory} to run it anew, or give another --out")
    return status


def write_status(run: PlannedRun, state: str, **more) -> None:
    """``state`` is RUNNING, FINISHED or FAILED; ``more``: ``returncode``, ``reason`` of a failed run, ``models_kept`` of a finished one."""
    identity: Identity = run.identity
    status = {"state": state, "time": time.time(), **vars(identity), "flags": run.flags, **more}
    with atomic_file(run.directory / STATUS) as part:
        part.write_text(json.dumps(status, indent=1), encoding="utf-8")


def is_finished(run: PlannedRun) -> bool:
    """Whether the run is done; PlanError when the directory holds a run with other flags, which would not compare."""
    status = read_status(run.directory)
    if status is None:
        return False
    if status["flags"] != run.flags:
        before, now = ("--" + w for w in (_difference(status["flags"], run.flags), _difference(run.flags, status["flags"])))
        raise PlanError(
            f"{run.directory} holds a run with other flags ({before} there, {now} now): give the same flags, another --out, or "
            "remove that directory"
        )
    return status["state"] == FINISHED


def entries_so_far(out: Path) -> list[Entry]:
    """The runs that ablations began in ``out``. Looks into no run: others remove their checkpoints while this one searches."""
    return [entry(path.parent) for path in sorted(out.glob(f"*/*/*/{STATUS}"))]  # ARM/SCHEME/seedN


def _difference(some: list[str], others: list[str]) -> str:
    """The first flag (with its values) of ``some`` that ``others`` lack."""
    there = [part for part in " ".join(others).split("--") if part]
    return next((part.strip() for part in " ".join(some).split("--") if part and part not in there), "nothing")
