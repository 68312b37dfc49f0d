"""Reports of directories as they are in the middle of things: runs that have just begun, broken files, flags that contradict."""

import json
import os

import pytest

from qarl_openrlhf.cli import report as cli
from qarl_openrlhf.report import ReportError, load_run
from qarl_openrlhf.report.discover import Identity, entries_below, identify
from tests.report.test_report import write_run


def flags(directory, **values):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps({"flags": {name.replace("__", "."): value for name, value in values.items()}}))
    return directory


def refused(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as error:
        cli.main(list(map(str, argv)))
    return str(error.value) + capsys.readouterr().err


@pytest.mark.parametrize(
    "preset, objective, name",
    [
        ("gspo", "grpo_tis", "grpo_tis"),  # --preset gspo --objective.name grpo_tis
        ("gspo", "gspo", "gspo"),
        ("tbpo_short", "tbpo", "tbpo_short"),  # what sets it apart from tbpo
        ("tbpo_short", "own.py:mine", "mine"),
        (None, "sapo", "sapo"),
        ("sapo", None, "sapo"),
        ("of_another_version", "tbpo", "tbpo"),
        (None, None, "openrlhf"),
        (3, None, "3"),
    ],
)
def test_a_run_is_called_by_what_ran(tmp_path, preset, objective, name):
    directory = flags(tmp_path, preset=preset, objective__name=objective, quant__scheme="w4a16", train__seed=1)
    assert identify(directory) == Identity(name, "w4a16", 1)


def test_runs_that_have_just_begun_are_left_out(tmp_path, capsys):
    for name in "ab":
        write_run(tmp_path / name, steps=3)
    flags(tmp_path / "begun", preset="tbpo")
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text('{"step": 1, "rollo')
    cli.main([str(tmp_path), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "begun/metrics.jsonl has no steps yet: left out" in printed and "first/metrics.jsonl has no steps yet" in printed
    states = {each.directory.name: (each.run is None, each.failure) for each in entries_below(tmp_path)}
    assert states == {"a": (False, None), "b": (False, None), "begun": (True, "not finished"), "first": (True, "not finished")}
    assert list(cli.arms_of([str(tmp_path / "a"), str(tmp_path / "begun")])) == ["a"]
    assert "no run has a step yet" in refused(capsys, tmp_path / "begun", "--out", tmp_path / "out")


BROKEN = ["{", "[]", "3", '"x"', "null", "{}", '{"state": "failed"}', '{"flags": [1]}', '{"flags": {"preset": 3}}', b"caf\xe9"]


@pytest.mark.parametrize("name", ["status.json", "run.json"])
def test_broken_json_is_a_note(tmp_path, name):
    for i, text in enumerate(BROKEN):
        run = write_run(tmp_path / str(i), steps=1)
        (run / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        only = tmp_path / f"only{i}"
        only.mkdir()
        (only / "status.json").write_bytes((run / name).read_bytes())
    for each in entries_below(tmp_path):
        i = int(each.directory.name.removeprefix("only"))
        said = any("is no JSON object" in note for note in each.notes)
        assert said == (i in (0, 1, 2, 3, 4, 9)), (each.directory, each.notes)


@pytest.mark.parametrize("step", ["NaN", "Infinity", "-Infinity", "null", '"x"', "[1]", "{}"])
def test_lines_without_a_step_are_notes(tmp_path, step):
    write_run(tmp_path, steps=2)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(f'{{"step": {step}}}\n'.encode() + b'caf\xe9\n[1]\n{"step": "3", "rollout/reward_mean": 1, "x": "caf\xe9"}\n')
    run = load_run(tmp_path)
    assert run.steps == [1, 2, 3] and len(run.notes) == 3


def test_where_nothing_can_be_written(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=2)
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/x"):
        message = refused(capsys, run, "--out", out)
        assert message.startswith(f"report: error: --out {out}: ") and "name a directory that can be written to" in message
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "nothing can be written" in refused(capsys, run, "--out", tmp_path / "locked")


def test_tokens_of_named_runs_and_flags_that_need_each_other(tmp_path, capsys):
    from qarl_openrlhf.metrics.records import write_records
    from qarl_openrlhf.objectives import build_objective
    from tests.metrics.test_diagnostics import observed

    record = observed(build_objective("tbpo"))[2].record
    for name in "ab":
        write_records(str(write_run(tmp_path / "set" / name, steps=1)), 1, record)
    write_run(tmp_path / "set" / "begun", steps=1)
    cli.main(["--tokens", f"w4a16:rollout={tmp_path / 'set' / 'a'}", f"all={tmp_path / 'set'}", "--out", str(tmp_path / "out")])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["tokens-all-set-a.html", "tokens-all-set-b.html", "tokens-w4a16:rollout.html"]
    assert "--steps chooses responses to show: it needs --tokens" in refused(capsys, tmp_path / "set" / "a", "--steps", "1")
    assert "names no directory" in refused(capsys, "") and "names no directory" in refused(capsys, "name=")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e308", '"x"', "null", "1" + "0" * 400])
def test_values_that_are_no_figures_are_gaps(tmp_path, value):
    from qarl_openrlhf.report.summary import write_summary

    for name in "ab":
        run = flags(tmp_path / name, preset="tbpo")
        lines = [f'{{"step": {i}, "rollout/reward_mean": {0.5 if i < 3 else value}, "policy_loss": {value}}}\n' for i in (1, 2, 3)]
        (run / "metrics.jsonl").write_text("".join(lines))
        assert load_run(run).series("rollout/reward_mean") == ([1, 2], [0.5, 0.5]) and not load_run(run).has("policy_loss")
    write_summary(entries_below(tmp_path), tmp_path)


def test_a_run_without_a_step_is_known_as_a_run(tmp_path):
    (tmp_path / "run.json").write_text('{"flags": {}}')
    for read in (load_run, entries_below):
        with pytest.raises(ReportError, match="has no steps yet: the run has begun, or ended before its first"):
            read(tmp_path)
    with pytest.raises(SystemExit, match="has no steps yet"):
        cli.main([str(tmp_path)])
