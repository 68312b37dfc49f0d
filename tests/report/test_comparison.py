"""Sets of runs: who collapsed and why, tables, pictures, and which arms can be told apart."""

import csv
import json
import math
import random

import pytest

from qarl_openrlhf.cli import report as cli
from qarl_openrlhf.metrics.records import write_records
from qarl_openrlhf.metrics.writer import MetricsWriter
from qarl_openrlhf.report import histograms, load_run, plots, summary, write_report
from qarl_openrlhf.report.collapse import collapse_reason
from qarl_openrlhf.report.discover import arms, entries_below, identify


def write_rewards(directory, rewards, **metrics):
    writer = MetricsWriter(str(directory))
    for step, reward in enumerate(rewards, 1):
        more = {name: values[step - 1] if isinstance(values, list) else values for name, values in metrics.items()}
        writer.write(step, {"rollout/reward_mean": reward, "timing/step_total": 2.0, "timing/train": 1.0, **more})
    return directory


def noisy(curve, seed=0, noise=0.02):
    generator = random.Random(seed)
    return [value + generator.gauss(0, noise) for value in curve]


RISE = [0.2 + 0.6 * min(1, i / 10) for i in range(30)]
FALL = RISE[:20] + [0.8 - 0.07 * i for i in range(10)]


@pytest.mark.parametrize(
    "rewards, metrics, reason",
    [
        (noisy(RISE), {}, None),
        (noisy([0.3] * 30), {}, None),  # learns nothing, but does not collapse
        (noisy([0.3] * 30, noise=0.15), {}, None),
        (noisy(FALL), {}, "of the gain since the start"),
        (noisy([0.6 - 0.02 * i for i in range(25)]), {}, "reward fell from 0.55"),
        (RISE, {"policy_loss": [0.1] * 6 + [math.nan] * 24}, "policy_loss is not finite in step 7"),
        (RISE, {"error_token/repeat_rate": [0.01] * 15 + [0.9] * 15}, "90% of the last steps' tokens are repeated (1%"),
        (RISE, {"error_token/repeat_rate": 0.6}, None),  # a task that repeats itself from the start
        ([0.9, 0.1], {}, None),
    ],
)
def test_collapse_is_called_with_its_reason(tmp_path, rewards, metrics, reason):
    found = collapse_reason(load_run(write_rewards(tmp_path, rewards, **metrics)))
    assert found is None if reason is None else reason in found, found


def test_noise_alone_is_hardly_ever_called_a_collapse(tmp_path):
    """200 flat and 200 rising runs with the noise of 64 responses a step."""
    called = 0
    for seed in range(200):
        for name, curve in (("flat", [0.5] * 20), ("rising", [0.3 + 0.02 * i for i in range(20)])):
            run = load_run(write_rewards(tmp_path / f"{name}{seed}", noisy(curve, seed, noise=0.06)))
            called += collapse_reason(run) is not None
    assert called <= 8  # 2 % of 400


def make_set(root, finals, schemes=("w4a16",), seeds=3):
    for arm, (final, spread) in finals.items():
        for scheme in schemes:
            for seed in range(seeds):
                directory = root / arm / scheme.replace(":", "-") / f"seed{seed}"
                top = final + spread * (seed - (seeds - 1) / 2)
                write_rewards(directory, [0.2] * 5 + [top] * 5, **{"policy/kl_start": 0.1, "policy/entropy_sampled": 1.0})
                flags = {"preset": arm, "objective.name": arm, "quant.scheme": scheme, "train.seed": seed}
                (directory / "run.json").write_text(json.dumps({"flags": flags}))
    return root


def test_a_directory_of_runs_gives_table_pictures_and_verdicts(tmp_path, capsys):
    make_set(tmp_path, {"tbpo": (0.9, 0.02), "gspo": (0.89, 0.02), "grpo_tis": (0.5, 0.02)}, ("w4a16", "w4a16:rollout"))
    cli.main([str(tmp_path)])
    rows = list(csv.DictReader(open(tmp_path / "summary.csv")))
    assert len(rows) == 18 and {row["scheme"] for row in rows} == {"w4a16", "w4a16:rollout"}
    first = next(row for row in rows if (row["objective"], row["scheme"], row["seed"]) == ("tbpo", "w4a16", "0"))
    assert float(first["final_reward"]) == pytest.approx(0.88) and float(first["kl_start"]) == pytest.approx(0.1)
    assert first["collapsed"] == "no" and first["status"] == "unknown" and float(first["step_seconds"]) == 2.0
    text = (tmp_path / "summary.md").read_text()
    assert "| tbpo | w4a16 | 3 | 10 | 0.900 ± 0.020 |" in text
    # the seeds' deviation is 0.02: 0.01 is 0.6 standard errors of two means of three
    assert "gspo: 0.010 lower, 0.6 standard errors: not told apart; 32 seeds each would do" in text
    assert "grpo_tis: 0.400 lower, 24.5 standard errors" in text
    for name in ("reward_by_scheme", "reward_by_objective", "entropy_by_objective", "kl_by_objective", "reward"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert "| tbpo | w4a16:rollout | 3 |" in capsys.readouterr().out


def test_held_out_accuracy_of_start_and_end(tmp_path):
    """The mean over data sets; a run may have none, and a killed one leaves half a line."""
    make_set(tmp_path, {"tbpo": (0.9, 0.02), "gspo": (0.9, 0.02)}, seeds=2)
    for seed, last in ((0, 0.5), (1, 0.7)):
        writer = MetricsWriter(str(tmp_path / "tbpo" / "w4a16" / f"seed{seed}"))
        for step, value in ((0, 0.2), (5, 0.9), (10, last)):
            more = {"eval_b_pass1": math.nan if step == 5 else value + 0.1, "eval_b_pass4": 1.0, "eval_num_samples": 8.0}
            writer.evaluation(step, {"eval_a_pass1": value - 0.1} | more)
        assert "evaluation of the start policy: a 0.100, b 0.300" in open(writer.notes_path).read()
        with open(writer.evaluations_path, "a") as file:
            file.write('{"step": 15, "eval_a_pa')
    # An asynchronous run does not evaluate its start policy: its first evaluation is no start.
    MetricsWriter(str(tmp_path / "gspo" / "w4a16" / "seed1")).evaluation(5, {"eval_a_pass1": 0.4})
    cli.main([str(tmp_path)])
    rows = {(row["objective"], row["seed"]): row for row in csv.DictReader(open(tmp_path / "summary.csv"))}
    assert (rows["gspo", "1"]["start_heldout"], rows["gspo", "1"]["final_heldout"]) == ("", "0.4")
    assert float(rows["tbpo", "1"]["start_heldout"]) == pytest.approx(0.2)
    assert float(rows["tbpo", "1"]["final_heldout"]) == pytest.approx(0.7) and rows["gspo", "0"]["final_heldout"] == ""
    text = (tmp_path / "summary.md").read_text()
    assert "held-out, later half" in text and "0.200 ± 0.000 | 0.600 ± 0.141 | +0.400 ± 0.141" in text
    assert (tmp_path / "heldout.png").stat().st_size > 1000
    assert [row["step"] for row in load_run(tmp_path / "tbpo" / "w4a16" / "seed0").evaluations] == [0, 5, 10]


def test_many_held_out_sets_of_any_name_make_one_picture(tmp_path):
    from matplotlib.image import imread

    make_set(tmp_path, {"tbpo": (0.9, 0.02)}, seeds=1)
    directory = tmp_path / "tbpo" / "w4a16" / "seed0"
    names = [r"costs $\no_formula$", "a/b c", "", *map(str, range(10))]
    MetricsWriter(str(directory)).evaluation(1, {f"eval_{name}_pass1": 0.5 for name in names})
    write_report({"tbpo": [directory]}, tmp_path)
    height, width, _ = imread(tmp_path / "heldout.png").shape
    assert 0.5 < width / height < 2  # four rows of four


def test_failed_and_unfinished_runs_are_in_the_summary(tmp_path):
    make_set(tmp_path, {"tbpo": (0.9, 0.0)}, seeds=1)
    for seed, status in ((1, {"state": "failed", "reason": "exit status 1: SyncError: engine 0"}), (2, {"state": "running"})):
        directory = tmp_path / "tbpo" / "w4a16" / f"seed{seed}"
        directory.mkdir()
        (directory / "status.json").write_text(json.dumps(status | {"objective": "tbpo", "scheme": "w4a16", "seed": seed}))
    cli.main([str(tmp_path)])
    rows = {row["seed"]: row for row in csv.DictReader(open(tmp_path / "summary.csv"))}
    assert [rows[s]["status"] for s in "012"] == ["unknown", "failed", "unfinished"]
    assert rows["1"]["steps"] == "0" and rows["1"]["reason"] == "exit status 1: SyncError: engine 0"
    text = (tmp_path / "summary.md").read_text()
    assert "tbpo w4a16 seed 1, failed: exit status 1: SyncError: engine 0" in text and "0 of 3, 1 failed" in text


def test_runs_of_one_arm_and_seed_are_told_apart(tmp_path):
    make_set(tmp_path / "a", {"tbpo": (0.9, 0.0)}, seeds=2)
    make_set(tmp_path / "b", {"tbpo": (0.9, 0.0)}, seeds=1)
    names = arms(entries_below(tmp_path))
    assert len(names) == 3 and names["tbpo w4a16"] == [tmp_path / "a/tbpo/w4a16/seed1"]
    assert identify(tmp_path / "nowhere").arm == "nowhere"


def test_runs_of_different_lengths_are_compared_up_to_one_step(tmp_path, capsys):
    from tests.metrics.test_diagnostics import observed

    for length in (12, 20):
        directory = tmp_path / "set" / f"arm{length}" / "w4a16" / "seed0"
        write_rewards(directory, [0.1 * (step > 12) for step in range(1, length + 1)])
        record = observed()[2].record
        for step in range(1, length + 1):
            write_records(str(directory), step, record)
        MetricsWriter(str(directory)).evaluation(length, {"eval_a_pass1": length / 100})
    run = load_run(directory).cut(12)
    assert run.steps == list(range(1, 13)) and run.evaluations == [] and run.cut(None) is run
    whole, part = (histograms.total_of([one], "mismatch")[0].sum() for one in (load_run(directory), run))
    assert part * 20 == whole * 12
    cli.main([str(tmp_path / "set"), "--until", "12", "--out", str(tmp_path / "out")])
    rows = list(csv.DictReader(open(tmp_path / "out" / "summary.csv")))
    assert {row["steps"] for row in rows} == {"12"} and {float(row["final_reward"]) for row in rows} == {0.0}
    assert sorted(row["final_heldout"] for row in rows) == ["", "0.12"]
    make_set(tmp_path / "killed", {"tbpo": (0.9, 0.0)}, seeds=1)
    status = tmp_path / "killed/tbpo/w4a16/seed0/status.json"
    status.write_text(json.dumps({"state": "failed", "reason": "killed"}))
    entries = [*entries_below(tmp_path / "killed"), *entries_below(tmp_path / "set")]
    for until, said in ((10, "finished"), (11, "failed")):  # it has ten steps
        told = {str(one["directory"]): one["status"] for one in (summary.row(entry.cut(until)) for entry in entries)}
        assert told.pop(str(status.parent)) == said and set(told.values()) == {"finished"}
    cli.main([str(tmp_path / "set"), "--until", "12"])
    assert (tmp_path / "set" / "until-12" / "reward.png").exists() and not (tmp_path / "set" / "reward.png").exists()
    with pytest.raises(SystemExit, match="has no step up to 0: its first is 1"):
        cli.main([str(tmp_path / "set"), "--until", "0", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
    with pytest.raises(SystemExit):
        cli.main([str(tmp_path / "set"), "--until", "3", "--tokens"])
    assert "with --tokens, give --steps" in capsys.readouterr().err


@pytest.mark.parametrize("count, beside", [(5, False), (6, True)])
def test_the_legend_of_many_arms_stands_beside_the_curves(tmp_path, count, beside):
    runs = {f"arm{i}": [load_run(write_rewards(tmp_path / str(i), [0.1, 0.2]))] for i in range(count)}
    figure = plots.reward(runs)
    assert len(figure.legends) == beside and (figure.axes[0].get_legend() is None) == beside
