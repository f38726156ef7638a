"""A real MPI world: roles by rank, messages between them, errors that end it."""

import getpass
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc import runlock
from areal_hpc.config.load import load_config, save_config
from areal_hpc.launch.local import find_mpiexec
from areal_hpc.launch.plan import plan_job
from areal_hpc.launch.step import REFUSAL_VARIABLE
from areal_hpc.paths import RunPaths

PEERS = Path(__file__).with_name("world_peers.py")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def mpirun(ranks: int, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [find_mpiexec(), "-n", str(ranks), sys.executable, str(PEERS), *arguments],
        capture_output=True, text=True, timeout=timeout, env=dict(os.environ),
    )


def test_roles_hosts_and_messages():
    result = mpirun(4, "talk")
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(result.stdout.split("\n")[:-1]) == [
        "controller 0 heard 600 messages in order from 3 ranks",
        "rollout 0 knows 4 hosts",
        "trainer 0 knows 4 hosts",
        "trainer 1 knows 4 hosts",
    ]


def test_large_messages_and_threads():
    result = mpirun(4, "threads")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "controller 0 got 40 answers of 3000000 bytes" in result.stdout


def test_a_world_of_the_wrong_size_is_refused_with_both_numbers():
    result = mpirun(3, "talk")
    assert result.returncode != 0
    assert "MPI world has 3 ranks but the configuration plans 4" in result.stdout + result.stderr


def test_an_idle_rank_uses_little_processor_time():
    result = mpirun(4, "idle")
    assert result.returncode == 0, result.stdout + result.stderr
    for line in result.stdout.splitlines():
        busy, wall = (float(word) for word in line.split()[-2:])
        assert wall >= 2.0
        assert busy < 0.5 * wall, line


@pytest.mark.parametrize("when", ["at once", "late"])
def test_messages_that_nobody_receives_do_not_spoil_the_end(when):
    result = mpirun(4, "leave", when)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "MPICH" not in result.stdout + result.stderr


def test_mpi_itself_minds_them():
    """Else the test above would prove nothing. Small ones that have arrived are an error, others a complaint."""
    result = mpirun(4, "leave", "unsettled")
    output = result.stdout + result.stderr
    assert "unmatched message" in output or "has pending" in output


def test_a_failing_rank_ends_the_world_within_seconds():
    start = time.monotonic()
    result = mpirun(4, "fail")
    assert result.returncode != 0
    assert time.monotonic() - start < 15.0
    assert "areal-hpc: trainer 1 on" in result.stdout + result.stderr
    assert "ValueError: broken on purpose" in result.stdout + result.stderr


@pytest.mark.parametrize("case", ["in use", "outward link"])
def test_ranks_write_nothing_before_the_folder_is_theirs(tmp_path, case):
    """The ranks of a second start, or of a job that waited while the folder was changed."""
    paths, refusal = RunPaths(tmp_path / "run"), tmp_path / "refused.txt"
    paths.create()
    config = load_config(QUICKSTART, [f"run.folder={paths.root}"])
    save_config(config, paths.config)
    paths.spans("controller", 0).write_text('{"c":"start"}\n')
    command = [find_mpiexec(), "-n", str(plan_job(config).num_ranks), sys.executable, "-m", "areal_hpc.main", "--run"]
    environment = {**os.environ, REFUSAL_VARIABLE: str(refusal)}
    with runlock.acquire(paths.lock) as lock:
        if case == "outward link":
            environment[runlock.HANDED_OVER] = lock.token
            (paths.root / "exports").symlink_to(tmp_path / "elsewhere")
        before = contents(paths)
        result = subprocess.run(
            [*command, str(paths.root)], capture_output=True, text=True, timeout=100.0, env=environment
        )
        after = contents(paths)
    if case == "outward link":
        # Taken from the launcher by the controller, and given back when it failed.
        del before["lock.json"]
    assert after == before
    output = result.stdout + result.stderr
    if case == "in use":
        # Not for good: the supervisor may try again, and the other run's must not hear of it.
        assert f"in use by {getpass.getuser()}" in output and not refusal.exists()
    else:
        assert "exports is a symbolic link to" in output and "exports is a symbolic link" in refusal.read_text()
    assert result.returncode != 0


def contents(paths: RunPaths) -> dict[str, bytes]:
    return {str(file.relative_to(paths.root)): file.read_bytes() for file in paths.root.rglob("*") if file.is_file()}
