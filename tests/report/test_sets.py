"""Sets of runs in the middle of things: directories under a name, seeds that have not come to their end, runs that begin too late."""

import csv
import json
from pathlib import Path

import pytest

from qarl_openrlhf.cli import report as cli
from qarl_openrlhf.report.discover import entries_below
from tests.report.test_comparison import make_set, write_rewards


def rows_of(directory) -> dict[str, dict]:
    return {row["directory"]: row for row in csv.DictReader(open(directory / "summary.csv"))}


def run_of(root, arm, seed, rewards, state=None, **status):
    directory = write_rewards(root / arm / f"seed{seed}", rewards)
    (directory / "run.json").write_text(json.dumps({"flags": {"objective.name": arm, "quant.scheme": "w4a16", "train.seed": seed}}))
    if state:
        status |= {"state": state, "objective": arm, "scheme": "w4a16", "seed": seed, "flags": []}
        (directory / "status.json").write_text(json.dumps(status))
    return directory


def test_a_directory_under_a_name_is_that_arm(tmp_path, capsys):
    """With ablations, deeper ones, single runs and unnamed directories beside it."""
    make_set(tmp_path / "set", {"tbpo": (0.9, 0.02), "gspo": (0.5, 0.02)}, seeds=2)
    seeds = {arm: [tmp_path / "set" / arm / "w4a16" / f"seed{i}" for i in (0, 1)] for arm in ("tbpo", "gspo")}
    named = [f"A={tmp_path / 'set/tbpo'}", f"B={tmp_path / 'set/gspo/w4a16'}"]
    assert cli.arms_of(named) == {"A": seeds["tbpo"], "B": seeds["gspo"]}
    mixed = {"A": [*seeds["tbpo"], seeds["gspo"][0]], "seed1": [seeds["gspo"][1]]}
    assert cli.arms_of([named[0], f"A={seeds['gspo'][0]}", str(seeds["gspo"][1])]) == mixed
    assert cli.arms_of([named[0], str(tmp_path / "set/gspo")]) == {"A": seeds["tbpo"], "gspo w4a16": seeds["gspo"]}
    assert cli.arms_of([f"all={tmp_path / 'set'}"]) == {"all": [*seeds["gspo"], *seeds["tbpo"]]}
    cli.main([*named, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("A #1", "A #2", "B #1", "B #2", "| A | w4a16 | 2 | 10 |", "| B | w4a16 | 2 | 10 |"))
    assert {row["objective"] for row in rows_of(tmp_path / "out").values()} == {"A", "B"}


@pytest.mark.parametrize("state", ["running", "failed"])
def test_only_finished_runs_are_in_means_and_comparison(tmp_path, state, capsys):
    for arm, final in (("tbpo", 0.9), ("gspo", 0.6)):
        for seed in (0, 1):
            run_of(tmp_path, arm, seed, [0.2] * 5 + [final + 0.02 * seed] * 5, "finished")
    run_of(tmp_path, "gspo", 2, [0.1] * 3, state, reason="killed")
    run_of(tmp_path, "sapo", 0, [0.95] * 4, state, reason="killed")
    cli.main([str(tmp_path)])
    text, word = (tmp_path / "summary.md").read_text(), {"running": "unfinished", "failed": "failed"}[state]
    assert "| gspo | w4a16 | 3 | 10/3 | 0.610 ± 0.014 |" in text
    assert f"Left out of the means and of the comparison, not being finished:\n\n- gspo w4a16: seed 2, {word} at 3 steps\n" in text
    # An arm without any other has its figures shown, but is not the best of the comparison.
    assert "| sapo | w4a16 | 1 | 4 | 0.950 |" in text and "w4a16: highest final reward tbpo; standard deviation between seeds 0.014" in text
    said = "No run of these arms is finished: their figures are those of the runs so far, and are not compared:\n\n- sapo w4a16: "
    assert f"{said}seed 0, {word} at 4 steps\n" in text and "gspo: 0.300 lower, 21.2 standard errors" in text and "sapo: " not in text
    assert sorted(row["status"] for row in rows_of(tmp_path).values()) == sorted([*["finished"] * 4, word, word])
    assert float(rows_of(tmp_path)[str(tmp_path / "gspo/seed2")]["final_reward"]) == pytest.approx(0.1)
    # Of up to three steps all are finished.
    cli.main([str(tmp_path), "--until", "3", "--out", str(tmp_path / "out")])
    assert {row["status"] for row in rows_of(tmp_path / "out").values()} == {"finished"}
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "not being finished" not in text and "No run of these arms" not in text and "| gspo | w4a16 | 3 | 3 | 0.167 ± 0.058 |" in text


def test_a_run_that_no_ablation_watched_is_of_unknown_state_and_counts(tmp_path):
    for seed, steps in ((0, 10), (1, 10), (2, 4)):
        run_of(tmp_path, "tbpo", seed, [0.5] * steps)
    cli.main([str(tmp_path)])
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"unknown"}
    text = (tmp_path / "summary.md").read_text()
    assert "| tbpo | w4a16 | 3 | 10/4 | 0.500 ± 0.000 |" in text and "not being finished" not in text
    states = {each.directory.name: each.cut(10).state for each in entries_below(tmp_path)}
    assert states == {"seed0": "finished", "seed1": "finished", "seed2": "unknown"}


def test_until_leaves_out_runs_that_begin_later(tmp_path, capsys):
    make_set(tmp_path / "set", {"tbpo": (0.9, 0.02)}, seeds=2)
    late = write_rewards(tmp_path / "set" / "late", [0.5] * 8)  # of a run that was resumed into a directory of its own
    path = late / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] > 5))
    (tmp_path / "set" / "begun").mkdir()
    (tmp_path / "set" / "begun" / "metrics.jsonl").write_text("")
    cli.main([str(tmp_path / "set"), "--until", "5", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert f"note: {late} has no step up to 5: its first is 6: left out" in printed
    assert {row["steps"] for row in rows_of(tmp_path / "out").values()} == {"5", "0"} and str(late) not in rows_of(tmp_path / "out")
    with pytest.raises(SystemExit, match="late has no step up to 5: its first is 6"):
        cli.main([str(late), "--until", "5", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def test_the_default_directory_of_several_holds_the_newest_report_alone(tmp_path, capsys, monkeypatch):
    """Nothing of an earlier one stays among the new pictures, and nothing that is no report's goes."""
    monkeypatch.chdir(tmp_path)
    make_set(tmp_path / "two", {"tbpo": (0.9, 0.02), "gspo": (0.5, 0.02)}, seeds=1)
    first, second = (run_of(tmp_path / "bare", arm, 0, [0.1, 0.2]) for arm in ("a", "b"))
    cli.main(["two/tbpo", "two/gspo"])
    assert "earlier report" not in capsys.readouterr().out
    before = {path.name for path in Path("report").iterdir()}
    cli.main([str(first), str(second)])
    assert "note: the earlier report in report is replaced: --out DIR keeps one" in capsys.readouterr().out
    after = {path.name for path in Path("report").iterdir()}
    cli.main([str(first), str(second), "--out", "fresh"])
    assert after == {path.name for path in Path("fresh").iterdir()} and before - after
    cli.main([str(first), str(second), "--until", "1"])
    cli.main([str(first), str(second)])  # it stays beside a report of the first steps
    assert Path("report", "until-1").is_dir()


@pytest.mark.parametrize("name", ["thesis.tex", "summary/own.txt"])
def test_a_directory_called_report_that_is_none_of_ours_is_left_alone(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    runs = [str(run_of(tmp_path / "bare", arm, 0, [0.1, 0.2])) for arm in ("a", "b")]
    own = tmp_path / "report" / name
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(SystemExit, match=f"report: error: report holds other files than a report's .{name.partition('/')[0]}.: name a directory with --out"):
        cli.main(runs)
    assert [path for path in (tmp_path / "report").rglob("*") if path.is_file()] == [own]
    cli.main([*runs, "--out", "report"])  # who names it, means it
    assert own.read_text() == "mine" and (tmp_path / "report" / "reward.png").exists()
