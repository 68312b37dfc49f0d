"""Running a plan: failures are reported and the rest goes on, a second call does what is left, flags must stay the same."""

import csv
import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from qarl_openrlhf.ablation import execute as execute_module
from qarl_openrlhf.ablation.execute import execute, last_error, only_one_in
from qarl_openrlhf.ablation.launch import LOG, Stopped, launch_here
from qarl_openrlhf.ablation.plan import PlannedRun, PlanError
from qarl_openrlhf.ablation.status import entries_so_far, is_finished, read_status
from qarl_openrlhf.metrics.writer import MetricsWriter
from qarl_openrlhf.report.discover import Identity, entries_below
from qarl_openrlhf.report.summary import write_summary


def planned(root, names=("a", "b", "c"), flags=("--x", "1")):
    return [PlannedRun(Identity(name, "w4a16", 0), root / name / "w4a16" / "seed0", [*flags, "--name", name]) for name in names]


class Trainer:
    """A launcher that trains nothing, quickly: writes one step, or fails as told."""

    def __init__(self, failing=()):
        self.failing, self.launched = failing, []

    def __call__(self, run, flags, stop):
        self.launched.append((run.identity.objective, flags))
        if run.identity.objective in self.failing:
            (run.directory / LOG).write_text("Traceback\nqarl_openrlhf.sync.errors.SyncError: engine 0 died\ncleaning up\n")
            return 1
        MetricsWriter(str(run.directory)).write(1, {"rollout/reward_mean": 0.5})
        (run.directory / "model").mkdir(exist_ok=True)
        return 0


def test_a_failing_run_is_reported_and_the_rest_goes_on(tmp_path, capsys):
    trainer, runs = Trainer(failing="b"), planned(tmp_path)
    failed = execute(runs, trainer, done=lambda run: write_summary(entries_below(tmp_path), tmp_path))
    assert [name for name, _ in trainer.launched] == ["a", "b", "c"] and failed == [runs[1]]
    assert "b w4a16 seed 0: FAILED" in capsys.readouterr().out
    rows = {row["objective"]: row for row in csv.DictReader(open(tmp_path / "summary.csv"))}
    assert [rows[name]["status"] for name in "abc"] == ["finished", "failed", "finished"]
    assert rows["b"]["reason"] == "exit status 1: qarl_openrlhf.sync.errors.SyncError: engine 0 died"
    assert not (runs[0].directory / "model").exists()


def test_a_second_call_does_what_is_left_from_the_last_checkpoint(tmp_path):
    runs = planned(tmp_path)
    execute(runs, Trainer(failing="bc"))
    (runs[2].directory / "checkpoints" / "_actor").mkdir(parents=True)
    again = Trainer()
    assert execute(runs, again, keep_models=True) == []
    assert again.launched == [("b", runs[1].flags), ("c", [*runs[2].flags, "--ckpt.load_enable"])]
    assert (runs[2].directory / "model").exists() and all(map(is_finished, runs))


def test_other_flags_in_the_same_place_are_refused(tmp_path):
    execute(planned(tmp_path), Trainer())
    with pytest.raises(PlanError, match=r"other flags \(--x 1 there, --x 2 now\)"):
        execute(planned(tmp_path, flags=("--x", "2")), Trainer())


def test_jobs_side_by_side(tmp_path):
    def launch(run, flags, stop):
        time.sleep(0.3)
        return 0

    started = time.monotonic()
    assert execute(planned(tmp_path, "abcd"), launch, parallel=4) == []
    assert time.monotonic() - started < 1.0


def test_the_summary_of_jobs_that_end_together_is_whole(tmp_path):
    """Every run's end writes the same two files; 40 runs, 8 at a time, that end at once. Meanwhile others remove their models."""
    runs, at_work = planned(tmp_path, [f"o{i}" for i in range(40)]), []

    def done(run):
        at_work.append(run)
        assert len(at_work) == 1, "two at a time"
        write_summary(entries_so_far(tmp_path), tmp_path)
        at_work.clear()

    assert execute(runs, Trainer(), parallel=8, done=done) == []
    rows = list(csv.DictReader(open(tmp_path / "summary.csv")))
    assert sorted(row["objective"] for row in rows) == sorted(run.identity.objective for run in runs)
    assert not [path for path in tmp_path.rglob(".*.part*")]


def test_runs_are_found_while_another_removes_its_checkpoints(tmp_path):
    runs, over = planned(tmp_path), threading.Event()
    execute(runs, Trainer())

    def train():
        while not over.is_set():
            (runs[0].directory / "checkpoints" / "_actor" / "step1").mkdir(parents=True)
            shutil.rmtree(runs[0].directory / "checkpoints")

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(300):
            assert [e.identity.objective for e in entries_so_far(tmp_path)] == ["a", "b", "c"]
    finally:
        over.set()
        trainer.join()


def test_an_error_of_the_ablation_itself_ends_the_other_jobs(tmp_path):
    ended, begun = [], threading.Event()

    def launch(run, flags, stop):
        if run.identity.objective == "b":
            begun.wait(20)
            raise OSError("disk full")
        begun.set()
        ended.append((run.identity.objective, stop.wait(20)))
        raise Stopped

    started = time.monotonic()
    with pytest.raises(OSError, match="disk full"):
        execute(planned(tmp_path, "abcd"), launch, parallel=2)
    assert ended == [("a", True)] and time.monotonic() - started < 5


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_counts_as_finished_before_its_checkpoint_goes(tmp_path, monkeypatch, killed):
    """A kill in the middle of removing leaves half a checkpoint, from which nothing can resume: the next call removes the rest."""
    (run,) = planned(tmp_path, "a")
    parts = [run.directory / "checkpoints" / "_actor" / name for name in ("one", "two")]

    def launch(run, flags, stop):
        for part in parts:
            part.mkdir(parents=True)
        return 0

    def remove(folder, ignore_errors):
        assert is_finished(run)
        if killed and folder.name == "checkpoints":
            parts[0].rmdir()
            raise KeyboardInterrupt
        rmtree(folder, ignore_errors=ignore_errors)

    rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(execute_module.shutil, "rmtree", remove)
        with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
            execute([run], launch)
    assert parts[1].exists() == killed
    again = Trainer()
    assert execute([run], again) == [] and again.launched == [] and not (run.directory / "checkpoints").exists()


def test_models_that_were_kept_stay_when_a_later_call_does_not_ask_for_them(tmp_path):
    runs = planned(tmp_path)
    execute(runs[:1], Trainer(), keep_models=True)
    execute(runs, Trainer())
    assert [(run.directory / "model").exists() for run in runs] == [True, False, False]


def test_two_ablations_do_not_share_a_directory(tmp_path):
    hold = (
        "import sys; from pathlib import Path\nfrom qarl_openrlhf.ablation.execute import only_one_in\n"
        "with only_one_in(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(PlanError, match="another ablation, or .* is at work in"):
        with only_one_in(tmp_path):
            pass
    other.communicate(timeout=20)
    with only_one_in(tmp_path):
        pass


def test_the_real_launcher_returns_train_qarls_status_and_log(tmp_path):
    (run,) = planned(tmp_path, "a", flags=["--quant.scheme", "nonsense"])
    run.flags = run.flags[:2]
    assert execute([run], launch_here) == [run]
    status = read_status(run.directory)
    assert status["state"] == "failed" and status["returncode"] == 2 and "nonsense" in status["reason"]
    assert "train_qarl --quant.scheme nonsense" in (run.directory / LOG).read_text()


def test_the_error_is_found_in_the_log(tmp_path):
    log = tmp_path / LOG
    assert last_error(log) == "no output"
    log.write_text("step 1\nValueError: bad\n  at exit\n")
    assert last_error(log) == "ValueError: bad"
    log.write_text("step 1\nKilled\n")
    assert last_error(log) == "Killed"
    assert json.dumps(last_error(log))
    cause = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    log.write_text(f"DistBackendError: NCCL error\n{cause}Cuda failure 2 'out of memory'\n")
    assert last_error(log) == "Last error: Cuda failure 2 'out of memory'"
    log.write_text(f"DistBackendError: NCCL error\n{cause}")
    assert last_error(log) == "ncclUnhandledCudaError: Call to CUDA function failed."
