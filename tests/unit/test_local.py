"""What `areal-hpc run` makes of the end of its ranks; mpiexec is real, the ranks are one-line programs."""

from __future__ import annotations

import json
import os
import sys

import pytest

from areal_hpc.config.load import load_config
from areal_hpc.launch import local
from areal_hpc.paths import RunPaths

FINISH = "import json, pathlib; pathlib.Path({status!r}).write_text(json.dumps(dict(state={state!r})));"
DIE = "import os; os.kill(os.getpid(), 9)"


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.create()
    return paths


def end_of(paths, program: str, monkeypatch) -> int:
    """The exit code of a run whose single rank executes `program`."""
    config = load_config("configs/quickstart.yaml", [f"run.folder={paths.root}"])
    monkeypatch.setattr(local, "mpi_command", lambda *_: [local.find_mpiexec(), "-n", "1", sys.executable, "-c", program])
    return local.finish_run(config, paths, "")


def test_a_rank_that_dies_after_the_finish_is_a_warning(paths, monkeypatch, capfd):
    program = FINISH.format(status=str(paths.status), state="finished") + DIE
    assert end_of(paths, program, monkeypatch) == 0
    output = capfd.readouterr().out
    assert "warning: a rank did not end in order" in output and f"run folder: {paths.root}" in output


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_rank_that_dies_before_is_a_failure(paths, monkeypatch, capfd, state):
    program = FINISH.format(status=str(paths.status), state=state) + DIE
    assert end_of(paths, program, monkeypatch) == 1
    assert "run folder" not in capfd.readouterr().out


def test_the_finish_of_an_earlier_attempt_does_not_count(paths, monkeypatch):
    paths.status.write_text(json.dumps({"state": "finished"}))
    os.utime(paths.status, (1e9, 1e9))
    assert end_of(paths, DIE, monkeypatch) == 1


def test_the_lost_process_is_named_by_its_rank(paths, monkeypatch, capfd):
    log = paths.log("rollout", 3)
    program = f"import os, pathlib; pathlib.Path({str(log)!r}).write_text(f'x pid {{os.getpid()}}\\n');" + DIE
    assert end_of(paths, program, monkeypatch) == 1
    assert f"RUNNING AT {os.uname().nodename}: rollout 3 (log: {log})" in capfd.readouterr().out
