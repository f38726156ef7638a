"""What a run cost by Slurm's accounting: every component, every life, every submission, and nobody else's."""

from __future__ import annotations

import time

import pytest

from areal_hpc.analysis import cost
from areal_hpc.analysis.cost import Used, accounting, known_jobs, parse_accounting
from areal_hpc.analysis.history import History
from areal_hpc.config.schema import Config
from areal_hpc.launch import slurm
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import append_jsonl, replace_json

HEADER = "JobID|State|End|ElapsedRaw|AllocNodes|AllocCPUS|AllocTRES\n"
HOUR_S = 3600.0
BEGIN = time.mktime(time.strptime("2026-11-29T08:00:00", "%Y-%m-%dT%H:%M:%S"))


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    found = RunPaths(tmp_path)
    found.create()
    found.slurm.mkdir(exist_ok=True)
    return found


def allocation(paths: RunPaths, job_id: str, at: float) -> None:
    append_jsonl(paths.slurm_events, {"time": at, "event": "allocation", "job_id": job_id, "seconds": 100.0})


def test_every_component_of_every_life():
    text = HEADER + (
        "7+0|COMPLETED|2026-11-29T11:00:00|3600|1|4|billing=4,cpu=4,node=1\n"
        "7+1|COMPLETED|2026-11-29T11:00:00|3600|2|16|cpu=16,gres/gpu=8,gres/gpu:a100=8,node=2\n"
        "7+1|REQUEUED|2026-11-29T08:30:00|1800|2|16|cpu=16,gres/gpu=8,node=2\n"
        "7+0|PENDING|Unknown|0|0|0|\n"
        "7+0|FAILED|2020-01-01T00:00:00|999|1|4|\n"
        "8|COMPLETED|2026-11-29T11:00:00|50|1|4|\n"
    )
    assert parse_accounting(text, {"7": BEGIN}) == [Used(3600, 1, 4, 0), Used(3600, 2, 16, 8), Used(1800, 2, 16, 8)]
    assert parse_accounting("", {"7": 0.0}) == []


def test_a_run_that_was_submitted_again_pays_for_its_first_job_too(paths, monkeypatch):
    # Ten hours as job 100, submitted again as job 200 the day after; many events lie between.
    allocation(paths, "100", BEGIN)
    for _ in range(2000):
        append_jsonl(paths.slurm_events, {"time": BEGIN + 1, "event": "step", "nodes": ["n1"] * 8})
    replace_json(paths.job, {"job_id": "200", "submitted": BEGIN + 24 * HOUR_S})
    allocation(paths, "200", BEGIN + 25 * HOUR_S)
    assert known_jobs(paths) == {"100": BEGIN, "200": BEGIN + 24 * HOUR_S}
    text = HEADER + (
        "100|COMPLETED|2026-11-29T18:00:00|36000|1|4|\n"
        "200|RUNNING|Unknown|3600|1|4|\n"
        # Long ago the counter stood there already.
        "200|COMPLETED|2026-11-29T09:00:00|777|1|4|\n"
    )
    monkeypatch.setattr(slurm, "command", lambda *words, **options: text if "100,200" in words else "")
    assert accounting(History(paths, Config())) == [Used(36000, 1, 4, 0), Used(3600, 1, 4, 0)]


def test_a_job_that_waited_long_and_came_back_counts_all_its_lives(paths):
    # Its script notes the job at each start, long after it was submitted.
    for at in (BEGIN, BEGIN + 5 * HOUR_S):
        replace_json(paths.job, {"job_id": "7", "submitted": at})
        allocation(paths, "7", at)
    text = HEADER + "7|REQUEUED|2026-11-29T09:00:00|3600|1|4|\n7|COMPLETED|2026-11-29T14:00:00|3500|1|4|\n"
    assert parse_accounting(text, known_jobs(paths)) == [Used(3600, 1, 4, 0), Used(3500, 1, 4, 0)]


def test_without_a_job_slurm_is_not_asked(paths, monkeypatch):
    monkeypatch.setattr(slurm, "command", None)
    assert accounting(History(paths, Config())) == [] and cost.known_jobs(paths) == {}
