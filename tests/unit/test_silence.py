"""A process that is really stopped falls silent in `areal-hpc status`, and speaks again when it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from areal_hpc.analysis import run_status
from areal_hpc.cli import main as cli
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import replace_json
from run_folders import make_run, quicken

RANK = """
import sys, time, types
from pathlib import Path
from areal_hpc.heartbeat import introduce, start_heartbeat
from areal_hpc.telemetry import Telemetry
path, role, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
telemetry = Telemetry(path)
world = types.SimpleNamespace(role=role, role_rank=rank, world_rank=rank, host="node")
introduce(telemetry, world, attempt=1, clock=(0.0, 0.0))
start_heartbeat(telemetry, interval_s=0.1)
while True:
    with telemetry.span("rollout.episode", group=1):
        time.sleep(0.05)
"""
SILENT_S = 2.0
DEADLINE_S = 60.0


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Iterator[tuple[RunPaths, dict[str, subprocess.Popen]]]:
    """A run whose ranks are processes of their own that do nothing but live."""
    quicken(monkeypatch)
    monkeypatch.setattr(run_status, "SILENT_S", SILENT_S)
    paths = make_run(tmp_path).paths
    for path in paths.telemetry.glob("*.jsonl"):
        path.unlink()
    names = [("controller", 0), ("trainer", 0), ("rollout", 0), ("rollout", 1)]
    processes = {
        f"{role} {rank}": subprocess.Popen([sys.executable, "-c", RANK, str(paths.spans(role, rank)), role, str(rank)])
        for role, rank in names
    }  # fmt: skip
    yield paths, processes
    for process in processes.values():
        process.kill()
        process.wait()


def silent(paths: RunPaths) -> list[str]:
    """Who is silent while the controller reports."""
    status = json.loads(paths.status.read_text())
    told = {name: {**sign, "time": 0.0} for name, sign in status["ranks"].items()}
    replace_json(paths.status, {**status, "state": "running", "time": time.time(), "ranks": told})
    return [rank.name for rank in run_status.inspect(paths.root).silent_ranks]


def wait_for(paths: RunPaths, expected: list[str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while (found := silent(paths)) != expected:
        assert time.monotonic() < end, f"silent: {found} instead of {expected}"
        time.sleep(0.05)


def test_a_stopped_process_is_named(ranks, capsys):
    paths, processes = ranks
    end = time.monotonic() + DEADLINE_S
    while len([rank for rank in run_status.inspect(paths.root).ranks if rank.age_s is not None]) < 4:
        assert time.monotonic() < end, "not all ranks began"
        time.sleep(0.05)
    wait_for(paths, [])

    os.kill(processes["rollout 1"].pid, signal.SIGSTOP)
    wait_for(paths, ["rollout 1"])
    assert cli(["status", str(paths.root)]) == 1
    text = capsys.readouterr().out
    assert "; silent: rollout 1\n" in text and "silent for" in text and "after rollout.episode" in text

    os.kill(processes["rollout 1"].pid, signal.SIGCONT)
    wait_for(paths, [])
    processes["trainer 0"].kill()
    wait_for(paths, ["trainer 0"])
