"""Runs resumed from earlier checkpoints: what the abandoned steps wrote is in no figure, whichever file it is in."""

import json
import random

import pytest

from qarl_openrlhf.cli import report as cli
from qarl_openrlhf.metrics.records import step_is_recorded, write_records
from qarl_openrlhf.metrics.writer import MetricsWriter
from qarl_openrlhf.report import load_run, write_report
from qarl_openrlhf.report.histograms import load_histograms
from qarl_openrlhf.report.table import summary
from qarl_openrlhf.report.tokens_html import load_records

COUNTS = {"ratio": {"at": [0], "n": [1]}}
RESPONSE = dict.fromkeys(("sampler", "tokens", "reward", "region", "push", "weight")) | {
    "why": "as it comes", "prompt": "", "ids": [1], "left_out": 0, "advantage": 0.0, "update": 0, "old": [-1.0], "current": [-1.0],
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """Lines of metrics.jsonl and evaluations.jsonl carry the time: one second a line, however fast they are written."""
    now = iter(range(10**9, 2 * 10**9))
    monkeypatch.setattr("qarl_openrlhf.metrics.writer.time.time", lambda: float(next(now)))


def leg(directory, steps, branch: int, *, evaluated=50, whys=("as it comes",)) -> None:
    """What a run writes from its start or a resume to where it ends, as the trainer does; each figure is the number of its branch."""
    writer = MetricsWriter(str(directory))
    for step in steps:
        counts = {"ratio": {"at": [0], "n": [branch]}}
        write_records(str(directory), step, {"histograms": counts, "tokens": [RESPONSE | {"prompt": str(branch), "why": why} for why in whys]})
        writer.write(step, {"rollout/reward_mean": float(branch)})
        if step % evaluated == 0:
            writer.evaluation(step, {"eval_default_pass1": float(branch)})


def read(directory) -> dict[str, dict[int, float]]:
    """{file: {step: branch it is of}}"""
    run, records = load_run(directory), load_records(directory)
    assert all(len({row["prompt"] for row in rows}) == 1 for rows in records.values())
    return {
        "metrics": {row["step"]: row["rollout/reward_mean"] for row in run.rows},
        "evaluations": {row["step"]: row["eval_default_pass1"] for row in run.evaluations},
        "histograms": {step: counts["ratio"]["n"][0] for step, counts in load_histograms(directory).steps.items()},
        "tokens": {step: float(rows[0]["prompt"]) for step, rows in records.items()},
    }


def test_the_steps_of_before_a_resume_are_left_out(tmp_path, clock, capsys):
    leg(tmp_path, range(1, 101), 1)
    leg(tmp_path, range(21, 31), 2)
    run = load_run(tmp_path)
    assert run.steps == list(range(1, 31)) and run.series("rollout/reward_mean")[1][-10:] == [2.0] * 10
    assert summary(run)["steps"] == "30" and summary(run)["reward, last 5 steps"].startswith("2.000")
    found = read(tmp_path)
    assert found["histograms"] == found["tokens"] == found["metrics"] and found["evaluations"] == {}
    said = f"metrics.jsonl of {tmp_path.name}: the run was resumed from an earlier checkpoint; 70 abandoned steps of before (31 to 100) are left out"
    assert said in run.notes and said in write_report({"a": [tmp_path]}, tmp_path / "out").notes
    cli.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert f"note: {said}" in capsys.readouterr().out


def test_nothing_is_said_of_steps_that_were_done_again(tmp_path, clock):
    leg(tmp_path, range(1, 26), 1, evaluated=5)
    leg(tmp_path, range(21, 31), 2, evaluated=5)
    assert load_run(tmp_path).notes == [] and load_run(tmp_path).steps == list(range(1, 31))
    assert read(tmp_path)["evaluations"] == {5: 1, 10: 1, 15: 1, 20: 1, 25: 2, 30: 2}


def test_evaluations_and_responses_of_before_are_known_before_new_ones_come(tmp_path, clock):
    """Every 50th step is evaluated and, after 100, every tenth recorded: the resumed run has come to none of those yet."""
    leg(tmp_path, range(1, 161), 1)
    leg(tmp_path, range(101, 104), 2)
    found = read(tmp_path)
    assert found["evaluations"] == {50: 1, 100: 1} and max(found["tokens"]) == 100
    leg(tmp_path, range(104, 151), 2)
    assert read(tmp_path)["evaluations"] == {50: 1, 100: 1, 150: 2} and read(tmp_path)["tokens"][150] == 2


@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_resumes(tmp_path, clock, seed):
    """Against the plain account of it: a resume at a step forgets what was done after that."""
    generator = random.Random(seed)
    wanted, at = {}, 0
    for branch in range(1, generator.randint(3, 6)):
        start, length = (generator.randint(0, at) if branch > 1 else 0), generator.randint(1, 60)
        steps = range(start + 1, start + length + 1)
        leg(tmp_path, steps, branch, evaluated=7)
        wanted = {step: b for step, b in wanted.items() if step <= start} | dict.fromkeys(steps, branch)
        at = steps[-1]
    found = read(tmp_path)
    assert found["metrics"] == found["histograms"] == wanted
    assert found["evaluations"] == {step: b for step, b in wanted.items() if step % 7 == 0}
    assert found["tokens"] == {step: b for step, b in wanted.items() if step_is_recorded(step)}


def test_of_a_step_done_twice_in_a_row_the_later_responses_are_shown(tmp_path, clock):
    """A resume by one step: nothing but the reasons tells the old responses from the new, of which there may be fewer."""
    leg(tmp_path, [1], 1, whys=("most out of band, A < 0", "as it comes", "most out of band, A > 0"))
    leg(tmp_path, [1], 2, whys=("most out of band, A > 0", "as it comes"))
    assert [(row["why"], row["prompt"]) for row in load_records(tmp_path)[1]] == [("most out of band, A > 0", "2"), ("as it comes", "2")]


def test_lines_that_a_kill_or_a_person_broke_do_not_end_a_branch(tmp_path, clock):
    leg(tmp_path, range(1, 6), 1)
    for name in ("metrics.jsonl", "histograms.jsonl", "tokens.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"step": -1, "counts": {}}\n{"step": null, "counts": {}}\n{"step": 2, "rollo\n')
    leg(tmp_path, range(6, 8), 1)
    assert set(read(tmp_path)["metrics"]) == set(read(tmp_path)["histograms"]) == set(range(1, 8))
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["time"] == 1e9  # the clock of this test is the writer's
