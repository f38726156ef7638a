"""Time of a rollout whose spans lie over one another: every second is counted once."""

from __future__ import annotations

import random

import pytest

from areal_hpc.analysis.history import History, Life
from areal_hpc.analysis.overlap import Exclusive, Part
from areal_hpc.analysis.timeline import BOUND, EVALUATE, GENERATE, IDLE, REWARD, START, TAIL, WEIGHTS, load_timeline
from areal_hpc.config.schema import Config
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry
from run_folders import T0


def rank_time(tmp_path, total_s: float, *spans: tuple):
    """RankTime of a rollout of these (name, begin, end, attributes), which began to work 5 s after its start."""
    paths = RunPaths(tmp_path)
    telemetry = Telemetry(paths.spans("rollout", 0))
    telemetry._write({"t": T0, "c": "start", "v": 1, "role": "rollout", "rank": 0, "host": "a", "cpus": [0]})
    telemetry._write({"t": T0 + 5, "c": "rollout.generated_tokens", "v": 0})
    for name, begin, end, attributes in spans:
        telemetry.record_span(name, T0 + 5 + begin, end - begin, **attributes)
    telemetry._write({"t": T0 + 5 + total_s, "c": "alive", "v": 1.0})
    telemetry.close()
    rank, = load_timeline(History(paths, Config(), lives=[Life(T0, T0 + 5 + total_s)])).ranks
    assert sum(rank.seconds.values()) == pytest.approx(rank.run_s) == 5 + total_s
    assert rank.bins.min() >= -1e-6, "no activity is taken off twice"
    assert rank.seconds[START] == 5
    return rank


def update(begin: float, end: float) -> tuple:
    return "rollout.update", begin, end, {"version": 1}


def idle(begin: float, end: float, waiting: str = "lease") -> tuple:
    return "rollout.idle", begin, end, {"waiting": waiting}


def episode(at: float) -> tuple:
    return "rollout.episode", at - 1, at, {"group": 1}


def test_an_update_of_an_idle_engine_is_an_update(tmp_path):
    # Sixty seconds of generation; of forty without requests the weights took twenty.
    found = rank_time(tmp_path, 100, update(40, 60), idle(30, 70), episode(100))
    assert dict(+found.seconds) == pytest.approx({START: 5, GENERATE: 60, IDLE: 20, WEIGHTS: 20})
    assert dict(+found.waits) == pytest.approx({BOUND: 20})


def test_whichever_of_them_ends_first(tmp_path):
    # The first update ends within the idleness; a lease ends the idleness within the second one.
    found = rank_time(
        tmp_path, 100, update(8, 12), idle(10, 20), update(18, 30), idle(40, 50), episode(90), update(49, 95)
    )
    assert dict(+found.seconds) == pytest.approx({START: 5, GENERATE: 23, IDLE: 6 + 9, WEIGHTS: 4 + 12 + 46})
    assert dict(+found.waits) == pytest.approx({BOUND: 6 + 9})


def test_several_evaluations_with_idleness_and_an_update_in_them(tmp_path):
    found = rank_time(
        tmp_path, 100, ("rollout.eval", 15, 20, {}), idle(22, 28, "reward"), update(26, 31),
        ("rollout.eval", 10, 30, {}), idle(80, 100),
    )  # fmt: skip
    assert dict(+found.seconds) == pytest.approx({START: 5, GENERATE: 59, EVALUATE: 12, IDLE: 4 + 20, WEIGHTS: 5})
    # All of it came after the last answer.
    assert dict(+found.waits) == pytest.approx({TAIL: 24}) and REWARD not in found.waits


def test_spans_are_painted_over_as_a_grid_of_seconds_would_be():
    numbers = random.Random(0)
    for _ in range(200):
        spans = sorted(
            (Part(begin, begin + numbers.randint(1, 12), numbers.randint(1, 3), "")
             for begin in (numbers.randint(0, 40) for _ in range(12))), key=lambda part: part.end,
        )  # fmt: skip
        exclusive, seconds, grid = Exclusive(), {1: 0, 2: 0, 3: 0}, {}
        for span in spans:
            for part, before in exclusive.put(span):
                seconds[part.strength] += part.end - part.begin
                if before is not None:
                    seconds[before.strength] -= part.end - part.begin
            for second in range(span.begin, span.end):
                grid[second] = max(grid.get(second, 0), span.strength)
        assert seconds == {strength: list(grid.values()).count(strength) for strength in (1, 2, 3)}
