"""Reports read real metrics.jsonl files and write real pictures."""

import json
import math
import re

import pytest

from qarl_openrlhf.cli import report as cli
from qarl_openrlhf.metrics.records import write_records
from qarl_openrlhf.metrics.writer import MetricsWriter
from qarl_openrlhf.objectives import build_objective
from qarl_openrlhf.report import ReportError, load_run, plots, token_plots, write_report
from qarl_openrlhf.report.runs import standard_error
from qarl_openrlhf.report.table import phase_seconds, reward_gain, table_text
from tests.metrics.test_diagnostics import observed

PNG = b"\x89PNG\r\n\x1a\n"


def row_titles(directory, steps) -> list[str]:
    text = table_text({"a": [load_run(write_run(directory, steps=steps, extra={"rollout/tok_per_s": 10.0}))]})
    return [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]


def test_figures_of_speed_are_of_the_same_steps_and_their_rows_say_which(tmp_path):
    """The first step warms up; where it is the only one there is nothing to say."""
    for steps, which in ((1, ""), (2, ", after step 1"), (12, ", after step 1")):
        titles = row_titles(tmp_path / str(steps), steps)
        speed = [title for title in titles if "a second" in title or "seconds a step" in title]
        assert f"rollout tokens a second, mean{which}" in speed and f"seconds a step{which}" in speed
        assert f"seconds a step{which}: generation" in speed and all(which in title for title in speed)
        assert not any("after" in title for title in titles if title not in speed)


def test_tokens_a_second_leave_the_first_step_out(tmp_path):
    writer = MetricsWriter(str(tmp_path))
    for step, speed in ((1, 1000.0), (2, 20.0), (3, 40.0)):
        writer.write(step, {"rollout/tok_per_s": speed, "timing/step_total": 1.0})
    assert re.search(r"tokens a second, mean, after step 1 +│ +30 ", table_text({"a": [load_run(tmp_path)]}))


def write_run(directory, steps=12, start=0.2, slope=0.05, mismatch=0.05, extra=None):
    writer = MetricsWriter(str(directory))
    writer.evaluation(0, {"eval_default_pass1": start})
    writer.evaluation(steps, {"eval_default_pass1": start + slope * steps})
    for step in range(1, steps + 1):
        writer.write(
            step,
            {
                "rollout/reward_mean": start + slope * (step - 1),
                "mismatch/abs_logp_mean": mismatch,
                "mismatch/kl": mismatch / 10,
                "mismatch/ratio_p01": 0.8,
                "mismatch/ratio_p99": 1.2,
                "mismatch/abs_logp_by_position/1": mismatch,
                "mismatch/abs_logp_by_position/2": mismatch * 2,
                "objective/in_band_frac": 0.75,
                "sync/changed_code_frac": 0.001,
                "sync/changed_code_frac_total": 0.0005 * step,
                "timing/generation": 10.0 if step == 1 else 3.0,
                "timing/old_logprobs": 1.0,
                "timing/train": 4.0,
                "timing/publish": 0.5,
                "timing/step_total": 20.0 if step == 1 else 9.0,
                "policy/entropy_sampled": 1.5,
                "error_token/low_prob_rate": 0.01,
                "error_token/repeat_rate": 0.0,
                "objective/pos_clip_frac": 0.1,
                "objective/neg_low_frac": 0.1,
                "objective/neg_high_frac": 0.05,
                "is/ess": 0.9,
                "is/clip_frac": 0.01,
                "policy/kl_start": 0.001 * step,
                "rollout/tok_per_s": 100.0,
                **(extra or {}),
            },
        )
    return directory


def test_full_run_makes_every_picture_and_a_table(tmp_path):
    run = write_run(tmp_path / "run")
    write_records(str(run), 1, observed(build_objective("mis_gspo", is_low=0.97, is_high=1.03))[2].record)
    report = write_report({"w4a16": [run]}, tmp_path / "out")
    names = sorted(path.stem for path in report.pictures)
    assert names == sorted(
        ["reward", "heldout", "mismatch", "mismatch_by_position", "step_time", "in_band", "changed_codes", "entropy", "error_tokens"]
        + ["clipping", "weights", "kl"]
        + ["ratio_histogram", "mismatch_histogram", "weight_histogram", "response_ratios", "old_against_current", "regions"]
    )
    assert all(path.read_bytes().startswith(PNG) for path in report.pictures)
    assert report.notes == []
    assert (tmp_path / "out" / "report.txt").read_text() == report.text
    for text in ("0.300 ± 0.035", "0.650 ± 0.035", "+0.350, +7.0", "0.0500 / 0.0500", "75%", "0.1%", "0.6%"):
        assert text in report.text, text


def test_gain_is_in_standard_errors(tmp_path):
    run = load_run(write_run(tmp_path, steps=10))
    gain = reward_gain(run)
    expected = math.sqrt(2) * standard_error([0.2, 0.25, 0.3, 0.35, 0.4])
    assert gain["edge"] == 5 and gain["gain"] == pytest.approx(0.25) and gain["z"] == pytest.approx(0.25 / expected)
    short = reward_gain(load_run(write_run(tmp_path / "short", steps=3)))
    assert short["edge"] == 1 and short["first_se"] is None and short["z"] is None


def test_phases_add_up_and_leave_the_first_step_out(tmp_path):
    seconds = phase_seconds(load_run(write_run(tmp_path)))
    assert seconds == pytest.approx(
        {"generation": 3.0, "old log-probs": 1.0, "training": 4.0, "publish": 0.5, "other": 0.5, "step": 9.0}
    )


def test_missing_families_are_notes(tmp_path):
    MetricsWriter(str(tmp_path)).write(1, {"rollout/reward_mean": 0.1})
    report = write_report({"a": [tmp_path]}, tmp_path)
    assert [path.name for path in report.pictures] == ["reward.png"]
    assert any("step_time.png skipped" in note for note in report.notes)
    assert "seconds" not in report.text and "in band" not in report.text


def titles(figure) -> list[str]:
    return [axis.get_title() for axis in figure.axes]


def test_panels_without_anything_are_left_out(tmp_path):
    none = {"error_token/repeat_rate": 0.0, "objective/neg_high_frac": 0.0, "is/clip_frac": 0.0, "policy/kl_start": None, "mismatch/k3": 0.01}
    arms = {"a": [load_run(write_run(tmp_path / "a", steps=2, extra=none))]}
    assert titles(plots.error_tokens(arms)) == ["Low-probability tokens"]
    assert titles(plots.clipping(arms)) == ["A > 0, outside", "A < 0, below"]
    assert titles(plots.weights(arms)) == ["Effective sample size of the mismatch weights"]
    assert titles(plots.kl(arms)) == ["KL(sampler || learner), a sampled token"]
    none |= dict.fromkeys(("error_token/low_prob_rate", "objective/pos_clip_frac", "objective/neg_low_frac", "sync/changed_code_frac"), 0.0)
    arms = {"a": [load_run(write_run(tmp_path / "b", steps=2, extra=none))]}
    assert plots.error_tokens(arms) is plots.clipping(arms) is plots.changed_codes(arms) is None
    assert any("clipping.png skipped" in note and "all are 0" in note for note in write_report(arms_of_paths(arms), tmp_path / "out").notes)
    arms["other"] = [load_run(write_run(tmp_path / "c", steps=2))]  # what one arm has is shown for all
    assert len(titles(plots.clipping(arms))) == 3


def arms_of_paths(arms: dict) -> dict:
    return {name: [run.directory for run in runs] for name, runs in arms.items()}


def with_counts(directory, change) -> dict:
    """{"a": [a run whose histograms are those of an observed rollout, after ``change`` of the row "counts"]}."""
    write_run(directory, steps=1)
    write_records(str(directory), 1, observed(build_objective("mis_gspo", is_low=0.97, is_high=1.03))[2].record)
    path = directory / "histograms.jsonl"
    header, row = map(json.loads, path.read_text().splitlines())
    change(row["counts"], header)
    path.write_text(json.dumps(header) + "\n" + json.dumps(row) + "\n")
    return {"a": [load_run(directory)]}


def keep(counts: dict, name: str, kept) -> None:
    """Of a histogram's sparse counts, the bins for whose flat index ``kept`` holds."""
    pairs = [(at, n) for at, n in zip(counts[name]["at"], counts[name]["n"]) if kept(at)]
    counts[name] = {"at": [at for at, _ in pairs], "n": [n for _, n in pairs]}


def test_token_pictures_leave_out_sides_and_pictures_without_tokens(tmp_path):
    whole = with_counts(tmp_path / "whole", lambda counts, header: None)
    assert titles(token_plots.regions(whole)) == titles(token_plots.ratio_histogram(whole)) == ["a, A < 0", "a, A > 0"]

    def only_positive(counts, header):
        for name in ("ratio", "seq_ratio"):
            size = math.prod(len(header["bins"][axis]) + (not isinstance(header["bins"][axis][0], str)) for axis in header["axes"][name][1:])
            keep(counts, name, lambda at, size=size: at >= 2 * size)

    positive = with_counts(tmp_path / "positive", only_positive)
    assert titles(token_plots.ratio_histogram(positive)) == titles(token_plots.response_ratios(positive)) == ["a, A > 0"]

    def only_inside(counts, header):
        counts["region"] = {"at": [header["bins"]["region"].index("inside")], "n": [7]}  # of the first sign and probability

    assert token_plots.regions(with_counts(tmp_path / "inside", only_inside)) is None


def test_unfinished_line_and_repeated_steps(tmp_path):
    write_run(tmp_path, steps=2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 2, "rollout/reward_mean": 0.9}) + '\n{"step": 3, "rollo')
    run = load_run(tmp_path)
    assert run.steps == [1, 2] and run.series("rollout/reward_mean")[1][-1] == 0.9
    assert len(run.notes) == 1 and "line 4" in run.notes[0]


def test_no_metrics_is_an_error_naming_the_directory(tmp_path):
    with pytest.raises(ReportError, match="metrics.jsonl does not exist"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ReportError, match="no steps"):
        load_run(tmp_path)


def test_null_metrics_are_gaps(tmp_path):
    writer = MetricsWriter(str(tmp_path))
    writer.write(1, {"mismatch/abs_logp_mean": float("nan"), "rollout/reward_mean": 0.5})
    writer.write(2, {"mismatch/abs_logp_mean": 0.1, "rollout/reward_mean": 0.5})
    assert load_run(tmp_path).series("mismatch/abs_logp_mean") == ([2], [0.1])
    assert len(write_report({"a": [tmp_path]}, tmp_path / "out").pictures) == 2


def test_arms_and_seeds_on_the_command_line(tmp_path, capsys):
    a, b, c = (write_run(tmp_path / name / "run", mismatch=m) for name, m in (("a", 0.05), ("b", 0.06), ("c", 0.9)))
    cli.main([f"w4a16={a}", f"w4a16={b}", f"w4a16:rollout={c}", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "w4a16 #1" in printed and "w4a16 #2" in printed and "w4a16:rollout" in printed and "0.9000" in printed
    assert (tmp_path / "out" / "mismatch.png").read_bytes().startswith(PNG)
    assert list(cli.arms_of([str(a), str(c)])) == ["a/run", "c/run"]
    assert list(cli.arms_of([str(a)])) == ["run"]


def test_command_line_refuses_without_traceback(tmp_path):
    with pytest.raises(SystemExit, match="report: error: .*does not exist"):
        cli.main([str(tmp_path)])


def test_table_has_a_column_an_arm(tmp_path):
    runs = {name: [load_run(write_run(tmp_path / name, steps=4))] for name in ("bf16", "w4a16")}
    header = table_text(runs).splitlines()[2]
    assert "bf16" in header and "w4a16" in header


def test_runs_of_unequal_length_are_told_with_the_step_that_makes_them_equal(tmp_path):
    for name, steps in (("long", 9), ("short", 4)):
        write_run(tmp_path / name, steps=steps)
    arms = {name: [tmp_path / name] for name in ("long", "short")}
    words = "the runs end at different steps (4 to 9), so their averages are of different steps: --until 4 compares equal ones"
    assert words in write_report(arms, tmp_path / "out").notes
    assert not any("--until" in note for note in write_report(arms, tmp_path / "out", until=4).notes)
