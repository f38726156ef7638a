"""Figures of a report: what is drawn is all that there is."""

from __future__ import annotations

from collections import Counter

import pytest

from areal_hpc.analysis.figures import staleness
from areal_hpc.analysis.history import History
from areal_hpc.analysis.run_data import RunData
from areal_hpc.analysis.trained import StepSums, Trained
from areal_hpc.config.schema import Config
from areal_hpc.paths import RunPaths


def run_of(tmp_path, counts: dict[int, int], bound: int = 2) -> RunData:
    """A run of one step that trained so many samples of each staleness."""
    config = Config()
    config.algorithm.max_staleness = bound
    mean = sum(value * count for value, count in counts.items()) / max(1, sum(counts.values()))
    step = {"train_step": 1, "staleness_mean": mean, "staleness_max": max(counts, default=0)}
    trained = Trained(steps={1: StepSums(staleness=Counter(counts))})
    return RunData("run", History(RunPaths(tmp_path), config, steps={1: step}), trained, None, None, None, "", "")


@pytest.mark.parametrize("counts", [{-3: 2, -1: 1, 0: 4, 2: 3}, {0: 5, 7: 5}, {}])
def test_the_bars_of_the_staleness_are_all_samples(tmp_path, counts):
    drawn = staleness([run_of(tmp_path, counts)])
    axes, trend = drawn.figure.axes
    heights = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in axes.patches}
    assert heights == pytest.approx({value: count / sum(counts.values()) for value, count in counts.items()})
    low, high = axes.get_xlim()
    assert all(low < value < high for value in counts) and low < 2 < high, "the bound is in sight too"
    mean, = trend.lines[0].get_ydata()
    assert trend.get_ylim()[0] <= mean
    assert ("Below 0" in drawn.caption) == (min(counts, default=0) < 0)


def test_a_bound_that_bounds_nothing_does_not_flatten_the_bars(tmp_path):
    drawn = staleness([run_of(tmp_path, {0: 3, 1: 1}, bound=1_000_000), run_of(tmp_path, {0: 1}, bound=4)])
    assert drawn.figure.axes[0].get_xlim()[1] < 10 and len(drawn.figure.axes[0].patches) == 3
    assert "η = 1000000 lies far beyond" in drawn.caption
