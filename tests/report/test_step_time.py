"""step_time.png: phases that can be seen in runs of any length, and phases that overlap."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from qarl_openrlhf.metrics.writer import MetricsWriter
from qarl_openrlhf.report import load_run, plots

STACKED = {"timing/generation": 3.0, "timing/train": 4.0, "timing/step_total": 8.0}
OVERLAPPING = {"timing/generation": 60.0, "timing/train": 50.0, "timing/step_total": 65.0}


def run_of(directory, steps, timings):
    writer = MetricsWriter(str(directory))
    for step in range(1, steps + 1):
        writer.write(step, timings)
    return load_run(directory)


def column(figure, axis, path) -> np.ndarray:
    """Colours [height, width, 3] of the picture between the first and the last step, and below the highest of the bars."""
    figure.savefig(path)
    picture = imread(path)[:, :, :3]
    low, high = axis.dataLim.intervalx
    (left, bottom), (right, top) = axis.transData.transform([(low + 0.1 * (high - low), 0.05), (low + 0.9 * (high - low), 7.9)])
    return picture[round(len(picture) - top) : round(len(picture) - bottom), round(left) : round(right)]


@pytest.mark.parametrize("steps", [20, 100, 300, 1000, 3000])
def test_bars_are_seen_in_their_colours(tmp_path, steps):
    figure = plots.step_time({"a": [run_of(tmp_path, steps, STACKED)]})
    pixels = column(figure, figure.axes[0], tmp_path / "x.png")
    for phase, share in (("generation", 3 / 8), ("training", 4 / 8), ("other", 1 / 8)):
        seen = (np.abs(pixels - to_rgb(plots.PHASE_COLORS[phase])).max(-1) < 0.02).mean()
        assert seen > (0.9 if steps > 100 else 0.5) * share, (phase, seen)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["generation", "training", "other"]


def test_phases_that_overlap_are_curves_below_the_step(tmp_path):
    for steps in (30, 300):
        (axis,) = plots.step_time({"a": [run_of(tmp_path / str(steps), steps, OVERLAPPING)]}).axes
        curves = {line.get_label(): set(line.get_ydata()) for line in axis.lines}
        assert curves == {"generation": {60.0}, "training": {50.0}, "step (phases overlap)": {65.0}}
        assert not axis.patches and axis.get_ylim()[1] < 75  # not the 110 of a stack


def test_runs_whose_phases_overlap_stand_beside_those_whose_do_not(tmp_path):
    runs = {"async": [run_of(tmp_path / "a", 4, OVERLAPPING)], "sync": [run_of(tmp_path / "b", 4, STACKED)]}
    (axis,) = plots.step_time(runs).axes
    bars = [(round(bar.get_x() + bar.get_width() / 2), bar.get_y(), bar.get_height()) for bar in axis.patches]
    assert {(run, height) for run, _, height in bars if height} == {(0, 60.0), (0, 50.0), (1, 3.0), (1, 4.0), (1, 1.0)}
    assert {bottom for _, bottom, _ in bars} == {0.0} and list(axis.lines[-1].get_ydata()) == [65.0, 8.0]
    lefts = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axis.patches)
    assert all(right <= left + 1e-9 for (_, right), (left, _) in zip(lefts, lefts[1:]))
    (axis,) = plots.step_time({"one": runs["sync"], "two": runs["sync"]}).axes
    assert {bar.get_y() for bar in axis.patches} == {0.0, 3.0, 7.0} and not axis.lines  # stacked as before
