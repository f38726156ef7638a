"""What a run counted of its troubles is the run's, whatever attempt they fell into."""

from __future__ import annotations

import json

import pytest

from areal_hpc.analysis.page import _faults
from areal_hpc.analysis.run_data import load_run
from areal_hpc.analysis.run_status import inspect
from areal_hpc.analysis.status_view import render
from areal_hpc.controller.ledger import read_runs
from controller_world import Disk, Faults
from run_folders import make_run, quicken

MORE = {"rollout__max_attempts": 20}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quicken(monkeypatch)


def last_step(paths) -> dict:
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"][-1]


def test_engine_restarts_before_a_resume_still_count(tmp_path):
    disk = Disk()
    troubled = Faults(restart=0.05, duplicate=0.5, stop_at=40)
    paths = make_run(tmp_path, seed=5, disk=disk, faults=troubled, **MORE).paths
    first = json.loads(paths.status.read_text())["counters"]
    assert first["engine_restarts"] > 0 and first["duplicates"] > 0 and first["granted_again"] > 0
    # The second attempt is stopped too; a machine went down and left half of its status.
    make_run(tmp_path, disk=disk, faults=Faults(stop_at=10), **MORE)
    assert json.loads(paths.status.read_text())["counters"]["engine_restarts"] == first["engine_restarts"]
    paths.status.write_text('{"counters": {"engine_re')
    make_run(tmp_path, disk=disk, **MORE)

    counters = json.loads(paths.status.read_text())["counters"]
    for name in ("engine_restarts", "duplicates", "granted_again"):
        assert counters[name] == last_step(paths)[name] >= first[name]
    assert counters["engine_restarts"] == first["engine_restarts"]
    assert [record["counters"].get("engine_restarts", 0) for record in read_runs(paths.ledger)] == [
        0, first["engine_restarts"], first["engine_restarts"]
    ]  # fmt: skip
    assert f"{first['engine_restarts']} engine restarts" in render(inspect(paths.root))
    assert f"<td>engine restarts</td><td class=n>{first['engine_restarts']}</td>" in _faults(load_run(paths.root))


def test_a_run_that_only_starts_again_keeps_its_counts(tmp_path):
    disk = Disk()
    paths = make_run(tmp_path, seed=5, disk=disk, faults=Faults(restart=0.05, stop_at=40), **MORE).paths
    first = json.loads(paths.status.read_text())["counters"]
    from areal_hpc.controller.progress import Progress

    waiting = Progress(paths, ranks={})
    waiting.write_status(lambda: {"state": "starting"}, force=True)
    assert json.loads(paths.status.read_text())["counters"] == first
