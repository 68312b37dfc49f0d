"""A second run into the same directory: everything of the first moves, together, and stays a run that can be reported."""

import json

import torch

from qarl_openrlhf.metrics.records import write_records
from qarl_openrlhf.metrics.run_directory import open_run_directory
from qarl_openrlhf.metrics.writer import MetricsWriter
from qarl_openrlhf.objectives import build_objective
from qarl_openrlhf.report import load_run, write_report
from qarl_openrlhf.report.discover import entries_below
from qarl_openrlhf.report.tokens_html import write_tokens_page
from tests.metrics.test_diagnostics import observed
from tests.report.test_report import write_run


def one_run(directory, reward: float) -> None:
    """All that a run leaves: the files while it trains, table and pictures at its end, a page of tokens on demand."""
    open_run_directory(str(directory), {"train.seed": reward}, resume=False)
    write_run(directory, steps=2, start=reward)
    MetricsWriter(str(directory)).note("start policy")
    write_records(str(directory), 1, {**observed(build_objective("tbpo"))[2].record, "start_policy": []})
    write_report({"arm": [directory]}, directory)
    write_tokens_page(directory)


def contents(directory) -> dict:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_everything_of_the_run_before_moves_together(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "own.png").write_text("a user's")
    one_run(tmp_path, 0.1)
    first = contents(tmp_path)
    assert {"metrics.jsonl", "notes.jsonl", "reward.png", "step_time.png", "report.txt", "tokens.html", "run.json"} <= first.keys()
    one_run(tmp_path, 0.2)
    second = contents(tmp_path)
    assert open_run_directory(str(tmp_path), {}, resume=False) == tmp_path / "earlier-2"
    del first["own.png"], second["own.png"]
    assert contents(tmp_path / "earlier-1") == first and contents(tmp_path / "earlier-2") == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier-1", "earlier-2", "model", "own.png", "run.json"]
    assert load_run(tmp_path / "earlier-1").rows[0]["rollout/reward_mean"] == 0.1


def test_nothing_moves_out_of_a_new_directory_or_for_a_resumed_run(tmp_path):
    assert open_run_directory(str(tmp_path / "run"), {}, resume=False) is None
    assert open_run_directory(str(tmp_path / "run"), {}, resume=False) is None  # one that ended before it measured anything
    MetricsWriter(str(tmp_path / "run")).write(1, {"rollout/reward_mean": 0.2})
    assert open_run_directory(str(tmp_path / "run"), {}, resume=True) is None
    MetricsWriter(str(tmp_path / "run")).write(2, {"rollout/reward_mean": 0.3})
    assert [row["rollout/reward_mean"] for row in load_run(tmp_path / "run").rows] == [0.2, 0.3]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["versions"]["torch"] == torch.__version__


def test_reports_of_many_runs_leave_earlier_ones_out(tmp_path):
    for reward in (0.1, 0.2):
        one_run(tmp_path / "run", reward)
    assert [entry.directory for entry in entries_below(tmp_path)] == [tmp_path / "run"]
    assert len(entries_below(tmp_path / "run" / "earlier-1")) == 1
