"""A run killed with -9 goes on from its last checkpoint, and ends with the bits of the run that was never killed."""

import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray._private.state import actors

from qarl_openrlhf import runtime
from qarl_openrlhf.checkpoint.find import tags
from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.preflight.resume import choose_checkpoint
from qarl_openrlhf.report import load_run

from tests.processes import command_line

from .conftest import argv

# A prompt set of eight, several times: later episodes' orders come after the resume. Evaluation draws from the same engine.
STEPS = 8
WANTED = {
    "quant.scheme": "w4a16:g32",
    "objective.name": "tbpo",
    "train.num_episodes": STEPS // 2,
    "rollout.stop": ["e"],
    "ckpt.save_steps": 1,
    "ckpt.max_num": 2,
}
VARIANTS = {
    "plain": {},
    "evaluation-ema-zero3": {"eval.steps": 1, "train.enable_ema": True, "ds.zero_stage": 3},
    "gae-critic": {
        "algo.advantage.estimator": "gae", "critic.num_nodes": 1, "critic.num_gpus_per_node": 1, "critic.adam.lr": 1e-3,
    },
    "two-engines-two-learners": {"vllm.num_engines": 2, "actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2},
    "muon": {"actor.optim": "muon", "actor.muon.lr": 1e-3},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def ray_head():
    import ray

    environment = runtime.set_environment("cpu")
    runtime.start_ray("cpu", runtime.ResourcePlan({"actor": 8}), environment, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def finished():
    """{variant: flags of a run that was never killed}, each made once."""
    return {}


@pytest.fixture
def begin(finished, flags, tiny_model, prompts, tmp_path_factory):
    """(flags of the undisturbed run, flags of the run to kill)."""

    def make(variant: str):
        model = tiny_model("llama", hidden=128)
        changes = dict(WANTED, **VARIANTS[variant])
        if "eval.steps" in changes:
            changes |= {"eval.dataset": prompts, "eval.n_samples_per_prompt": 2}
        if changes.get("algo.advantage.estimator") == "gae":
            changes["critic.model_name_or_path"] = model
        if variant not in finished:
            out = str(tmp_path_factory.mktemp(variant))
            wanted = flags(model) | changes | {"ckpt.output_dir": out, "ckpt.path": os.path.join(out, "ckpt")}
            train_qarl.main(argv(wanted))
            finished[variant] = wanted
        return finished[variant], flags(model, "killed") | changes

    return make


LOOK_AGAIN_S = 0.3


def learner_processes() -> list[psutil.Process]:
    """The run's, as Ray knows them."""
    found = []
    for actor in actors().values() if ray.is_initialized() else ():
        if actor["ActorClassName"] == "QarlPolicyActor" and actor["State"] == "ALIVE":
            with suppress(psutil.Error):
                found.append(psutil.Process(actor["Pid"]))
    return found


# Which moment of a step is meant, given what the learner does, the steps that are done, the newest whole checkpoint's step and
# whether the next is being written. A moment lasts a tenth of a second: whoever misses one waits for the next step's.
PHASES = {
    "rollout": lambda busy, done, saved, partial: saved == done and busy == "",
    "update": lambda busy, done, saved, partial: saved == done and busy == "fit",
    "push": lambda busy, done, saved, partial: saved == done and busy == "broadcast_to_vllm",
    "checkpoint": lambda busy, done, saved, partial: done > 2 and saved < done and partial,
}


def newest(actor: Path) -> int:
    """Step of the newest whole checkpoint in a directory of them."""
    return max((int(tag.rpartition("step")[2]) for tag in tags(actor) if not tag.startswith("best")), default=0)


class Killer(threading.Thread):
    """Kills the learner with SIGKILL in a phase of a step, the third or, if that was missed, a later one."""

    def __init__(self, wanted: dict, phase: str):
        super().__init__(daemon=True)
        self.metrics, self.actor = Path(wanted["ckpt.output_dir"], "metrics.jsonl"), Path(wanted["ckpt.path"], "_actor")
        self.phase = PHASES[phase]
        self.saved, self.failed, self.over = None, None, threading.Event()
        self.seen: dict[str, int] = {}  # what learners were found doing, for the message of a missed kill

    def run(self):
        try:
            self.saved = self.kill()
        except Exception as error:
            self.failed = error

    def kill(self) -> int | None:
        """Step of the newest whole checkpoint after the kill; None if the run was over first."""
        learners, looked = [], -1.0
        while not self.over.wait(0.002):
            done = self.metrics.read_text().count("\n") if self.metrics.exists() else 0
            if not 2 <= done < STEPS:
                continue
            if time.monotonic() > looked + LOOK_AGAIN_S:
                learners, looked = learner_processes(), time.monotonic()
            partial = any(path.suffix == ".partial" and f"step{done}" in path.name for path in self.actor.glob("*"))
            for process in learners:
                title = command_line(process)
                self.seen[title] = self.seen.get(title, 0) + 1
                if title and self.phase(title.partition(".")[2], done, newest(self.actor), partial):
                    self.pid = process.pid
                    process.kill()
                    process.wait(30)
                    return newest(self.actor)
        return None


def train_and_kill(wanted: dict, phase: str) -> int:
    """Returns the step of the newest whole checkpoint that the killed learner left."""
    killer = Killer(wanted, phase)
    killer.start()
    ended = None
    try:
        train_qarl.main(argv(wanted))
    except SystemExit as error:  # the one line that names the killed learner
        ended = str(error)
    finally:
        killer.over.set()
        killer.join()
    if killer.failed:
        raise killer.failed
    assert killer.saved is not None, f"the run ended before its learner was killed: {ended!r}; it was seen as {killer.seen}"
    assert ended is not None, "the run went on without its learner"
    assert re.search(rf"learner, rank \d: its process \(pid {killer.pid} ", ended), ended  # of two, whichever was seen first
    assert 2 <= killer.saved < STEPS
    return killer.saved


def check_same(one: dict, other: dict, *, since: int) -> None:
    """Metrics of the steps after ``since``, and the last checkpoints, bit for bit."""
    rows, others = (load_run(w["ckpt.output_dir"]).rows for w in (one, other))
    assert [row["step"] for row in others] == [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row, again in zip(rows[since:], others[since:], strict=True):
        measured = ("timing/", "time", "kernels/", "memory/")
        names = [n for n in row if not n.startswith(measured) and not n.endswith(("_ms", "_per_s", "_gbps")) and "tok_per_s" not in n]
        differing = {n: (row[n], again.get(n)) for n in names if row[n] != again.get(n)}
        assert not differing, f"step {row['step']}: {differing}"
    for part in ("_actor", "_critic"):
        last = os.path.join(part, f"global_step{len(rows)}")
        directory = os.path.join(one["ckpt.path"], last)
        if os.path.isdir(directory):
            for name in sorted(n for n in os.listdir(directory) if n.endswith(".pt")):
                states = [torch.load(os.path.join(w["ckpt.path"], last, name), weights_only=False) for w in (one, other)]
                assert_equal(*states, where=f"{part}/{name}")


def assert_equal(one, other, where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif hasattr(one, "tobytes"):
        assert one.tobytes() == other.tobytes(), where
    elif isinstance(one, (int, float, str, bytes, bool, type(None))):
        assert one == other or one != one, f"{where}: {one} and {other}"


def check(begin, variant: str, phase: str) -> None:
    undisturbed, wanted = begin(variant)
    saved = train_and_kill(wanted, phase)
    again = argv(wanted | {"ckpt.load_enable": True})
    train_qarl.main(again)
    check_same(undisturbed, wanted, since=saved)
    # What the workers wrote into it is what these flags give: no note on other ones.
    assert choose_checkpoint(train_qarl.resolve(again)[0]) == [f"resuming from {wanted['ckpt.path']}/_actor/global_step{STEPS}"]
    leftovers = [name for name in os.listdir(os.path.join(wanted["ckpt.path"], "_actor")) if name.endswith(".partial")]
    assert not leftovers
    shutil.rmtree(wanted["ckpt.path"])


# Slow, all of them: on some machines the titles that say what a process is busy with are not there for seconds, and a run ends
# before it is killed. Resumed learners (bit for bit) and runs that a signal ends are in the default tests (tests/actors/test_checkpoints.py,
# test_faults.py).
@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_any_phase(begin, phase):
    check(begin, "plain", phase)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
def test_everything_that_a_run_may_have_is_restored(begin, variant):
    check(begin, variant, "update")


@pytest.mark.slow
@pytest.mark.parametrize("generated", [None, 8])
def test_an_asynchronous_run_goes_on_in_its_episode(generated, flags, tiny_model):
    """Ten prompts in rollouts of four, four and two. ``generated``: prompts sampled at a time, more than a rollout trains on."""
    wanted = flags(tiny_model("llama", hidden=128), "async") | {
        "quant.scheme": "w4a16:g32", "objective.name": "tbpo", "train.async_enable": True, "data.max_samples": 10,
        "ckpt.save_steps": 1, "ckpt.max_num": 5, "rollout.vllm_generate_batch_size": generated or 4,
    }  # fmt: skip
    actor = Path(wanted["ckpt.path"], "_actor")
    train_qarl.main(argv(wanted))
    assert [row["step"] for row in load_run(wanted["ckpt.output_dir"]).rows] == [1, 2, 3]
    tokens = [row["rollout/tokens"] for row in load_run(wanted["ckpt.output_dir"]).rows]

    train_qarl.main(argv(wanted | {"ckpt.load_enable": True}))  # nothing is left to do
    assert newest(actor) == 3 and [row["step"] for row in load_run(wanted["ckpt.output_dir"]).rows] == [1, 2, 3]

    for tag in ("global_step2", "global_step3"):
        shutil.rmtree(actor / tag)
    train_qarl.main(argv(wanted | {"ckpt.load_enable": True}))
    rows = load_run(wanted["ckpt.output_dir"]).rows
    assert [row["step"] for row in rows] == [1, 2, 3] and newest(actor) == 3
    # The last rollout is of two prompts; a run that began its episode anew, or lost prompts, would have others.
    assert rows[2]["rollout/tokens"] < rows[1]["rollout/tokens"] and rows[0]["rollout/tokens"] == tokens[0]
