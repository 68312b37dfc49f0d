"""Errors of ours reach whoever started a run as their message, whatever Ray made of them; others keep their traceback."""

import importlib
import re
from pathlib import Path

import pytest
import ray

from qarl_openrlhf.cli.own_errors import own_message
from qarl_openrlhf.engine.start_error import EngineStartError

ROOT = Path(__file__).parents[2]


def own_classes() -> list[type]:
    """Every error of this package. Found in its text: Ray's workers import this file, and should not import all of that."""
    found = []
    for path in sorted(ROOT.glob("qarl_openrlhf/**/*.py")):
        if names := re.findall(r"^class (\w+)\(\w*(?:Error|Exception)\)", path.read_text(), re.MULTILINE):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found += [getattr(module, name) for name in names]
    return found


def test_every_error_of_ours_is_told_through_several_processes():
    kinds = own_classes()
    assert {"SyncError", "ManifestError", "ProbeError", "QuantError", "ObjectiveError", "CheckpointError"} <= {k.__name__ for k in kinds}
    for kind in kinds:
        error = kind("tensor x has 1 NaN")
        for process in ("learner", "controller"):
            error = ray.exceptions.RayTaskError(f"ray::{process}", "Traceback ...\nmany lines", error, process, 1, "::1").as_instanceof_cause()
        assert own_message(error) == own_message(kind("tensor x has 1 NaN")) == "tensor x has 1 NaN", kind


class Actor:
    """Raises ``error`` at its start, or when it is called; "through" it, what another raises."""

    def __init__(self, error: Exception | None = None):
        if error is not None:
            try:
                raise OSError("a cause\nthat says more")
            except OSError as cause:
                raise error from cause

    def call(self, error: Exception):
        raise error

    def through(self, other, *arguments):
        ray.get(other.call.remote(*arguments))


def test_what_ray_makes_of_them(small_ray):
    def met(call, *arguments) -> Exception:
        with pytest.raises(ray.exceptions.RayError) as raised:
            ray.get(call.remote(*arguments), timeout=100)
        return raised.value

    actor_class = ray.remote(num_cpus=0)(Actor)
    controller, engine = actor_class.remote(), actor_class.remote()
    # The last line of what the second raises only quotes one of ours.
    for error in (EngineStartError("engine 0: no room: ValueError: 1"), EOFError("qarl_openrlhf.sync.errors.SyncError: quoted")):
        told = None if isinstance(error, EOFError) else str(error)
        failed = actor_class.remote(error)
        assert own_message(met(engine.call, error)) == own_message(met(controller.through, engine, error)) == told
        assert own_message(met(failed.call, error)) == own_message(met(controller.through, failed, error)) == told
