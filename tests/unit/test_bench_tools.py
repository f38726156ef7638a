"""The benchmarks' own parts: lengths that two modes share, lines that are counted, cores of others."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import bench_async  # noqa: E402
import bench_spool  # noqa: E402
import experiment_staleness  # noqa: E402
from bench_async import OtherPrograms, error  # noqa: E402
from bench_telemetry import cost_of_a_line, share_of_run  # noqa: E402
from bench_workflow import LongTailed  # noqa: E402

from areal_hpc.config.load import load_config  # noqa: E402
from areal_hpc.data.byte_tokenizer import save_byte_tokenizer  # noqa: E402
from areal_hpc.paths import RunPaths  # noqa: E402
from areal_hpc.rollout.tokens import load_tokenizer  # noqa: E402
from areal_hpc.telemetry import Telemetry  # noqa: E402
from areal_hpc.types import SamplingSpec  # noqa: E402
from test_workflow import run  # noqa: E402

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class Engine:
    """What the workflow asks of an episode's engine before it generates."""

    group_size = 4

    def __init__(self, group: int, limit: int = 1000) -> None:
        self.group, self.sampling = group, SamplingSpec(max_new_tokens=limit)

    def seed(self, sample_index: int, turn: int) -> int:
        return hash((self.group, sample_index, turn))


def budgets(limit: int = 1000, groups: int = 2000, **options: float) -> np.ndarray:
    workflow = LongTailed(**options)
    engines = [Engine(group, limit) for group in range(groups)]
    return np.array(
        [[workflow._limited(engine, index).sampling.max_new_tokens for index in range(4)] for engine in engines]
    )


def test_lengths_are_long_tailed_and_the_same_in_every_run():
    found = budgets(mean=100, sigma=1.0, limit=100_000)
    assert found.mean() == pytest.approx(100, rel=0.1) and found.min() >= 1
    assert found.max() > 10 * found.mean() and np.median(found) < 70
    assert (found == budgets(mean=100, sigma=1.0, limit=100_000)).all()
    assert len({tuple(row) for row in found.tolist()}) > 1900


def test_lengths_keep_to_the_limit_and_leave_the_episode_alone():
    assert budgets(mean=100, sigma=2.0, limit=300).max() == 300
    engine = Engine(1)
    limited = LongTailed(mean=10)._limited(engine, 0)
    assert limited is not engine and engine.sampling.max_new_tokens == 1000


def test_a_whole_episode_has_the_drawn_lengths(tmp_path):
    save_byte_tokenizer(tmp_path)
    trajectories, engine, _ = run(LongTailed(mean=40), load_tokenizer(str(tmp_path)), ["x" * 390] * 2, group_size=2)
    assert [one.sample_index for one in trajectories] == [0, 1]
    drawn = [sampling.max_new_tokens for _, sampling, _, _ in engine.calls]
    assert [one.num_loss_tokens for one in trajectories] == drawn and len(set(drawn)) == 2


def test_lines_of_a_run_are_counted_over_its_time(tmp_path, capsys):
    paths = RunPaths(tmp_path)
    for name, count in (("rollout", 1000), ("trainer", 10)):
        telemetry = Telemetry(paths.spans(name, 0))
        for number in range(count):
            telemetry.record_span("x", 100.0 + 10.0 * number / (count - 1), 0.0)
        telemetry.close()
    figures = share_of_run(paths, 1e-5)
    assert figures["lines_per_s"] == pytest.approx(100, rel=0.01)
    assert figures["telemetry_share"] == pytest.approx(1e-3, rel=0.01) and figures["span_us"] == pytest.approx(10)


def test_a_line_has_a_cost():
    assert 0 < cost_of_a_line(1) < 1e-3


def test_own_children_are_not_other_programs(monkeypatch):
    """Of 3 cores in use, those of this process and its children are taken out."""

    class Process:
        def __init__(self, pid: int = 1, cores: float = 0.5) -> None:
            self.pid, self.cores = pid, cores

        def children(self, recursive: bool) -> list:
            assert recursive
            return [Process(2, 1.5)]

        def cpu_times(self) -> tuple[float, float]:
            return (0.75 * self.cores * time.monotonic(), 0.25 * self.cores * time.monotonic())

    class Times(NamedTuple):
        user: float
        idle: float
        iowait: float

    monkeypatch.setattr(bench_async.psutil, "Process", Process)
    monkeypatch.setattr(bench_async.psutil, "cpu_times", lambda: Times(3 * time.monotonic(), 5.0, 1.0))
    with OtherPrograms(interval_s=0.1) as others:
        time.sleep(0.6)
    assert others.cores == pytest.approx(1.0, abs=0.1)


def test_errors_are_relative():
    assert error(115, 100) == pytest.approx(0.15) and error(85, 100) == pytest.approx(0.15)


def test_bench_spool_says_where_it_cannot_write(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["bench_spool.py", "--folder", str(tmp_path / "file" / "under")])
    with pytest.raises(SystemExit, match="2"):
        bench_spool.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith("Not a directory")


@pytest.mark.parametrize("objective", experiment_staleness.OBJECTIVES)
@pytest.mark.parametrize("eta", [0, 16])
def test_every_case_of_the_staleness_experiment_is_a_configuration(objective, eta):
    """Whatever the quickstart's own objective is made of."""
    case = experiment_staleness.Case(objective, eta, seed=2)
    config = load_config(QUICKSTART, experiment_staleness.settings(case, 40, 256))
    algorithm = config.algorithm
    assert (algorithm.objective.value, algorithm.max_staleness, algorithm.backlog) == (objective, eta, eta)
    assert algorithm.behaviour_weight == "full"
