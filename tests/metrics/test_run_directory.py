"""A second run into the same directory: everything of the first moves, together, and stays a run that can be reported."""

import json
import os

import pytest
import torch

from qarl_openrlhf.cli.own_errors import own_message
from qarl_openrlhf.metrics.errors import MetricsError
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


@pytest.mark.parametrize("name", ["metrics.jsonl", "notes.jsonl", "evaluations.jsonl", "histograms.jsonl", "tokens.jsonl", "start_policy.json", "run.json"])
def test_a_full_disk_names_the_file_and_the_flag(tmp_path, name):
    os.symlink("/dev/full", tmp_path / name)  # every write there fails as on a full disk
    with pytest.raises(MetricsError, match=rf"{tmp_path / name} could not be written: the disk is full .*[MG]iB are free.*--metrics.dir") as error:
        open_run_directory(str(tmp_path), {}, resume=True)
        writer = MetricsWriter(str(tmp_path))
        writer.write(1, {"x": 1.0})
        writer.evaluation(1, {"eval_a_pass1": 0.5})
        write_records(str(tmp_path), 1, {"histograms": {"x": {"0": 1}}, "tokens": [{"id": 1}], "start_policy": [{"ids": [1]}]})
    assert "\n" not in str(error.value) and own_message(error.value) == str(error.value)


def test_what_is_no_full_disk_has_the_file_and_the_flag_too(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(MetricsError, match="metrics.jsonl could not be written: IsADirectoryError.*--metrics.dir"):
        MetricsWriter(str(tmp_path)).write(1, {})
