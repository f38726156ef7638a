"""A real Slurm on this machine for the session, and what the tests do with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.paths import RunPaths

ROOT = Path(__file__).parents[2]
MINISLURM = ROOT / "tools" / "minislurm.py"
NODES = 6
STAND_IN = Path(__file__).with_name("stand_in")


class Cluster:
    """The rehearsal cluster; commands run as a user would type them."""

    def __init__(self, conf: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(conf), "PYTHONPATH": str(ROOT)}
        for name in [name for name in self.environment if name.startswith(("SLURM_JOB", "PMI_"))]:
            del self.environment[name]

    def slurm(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def cli(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "areal_hpc.cli", *arguments], env={**self.environment, **environment}, cwd=ROOT,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    def submit(self, paths: RunPaths, model: Path, *overrides: str, **environment: str) -> str:
        """Queue the quickstart task; the job id."""
        result = self.cli(
            "submit", "configs/quickstart.yaml", "launch.site=rehearsal", f"model.path={model}",
            f"run.folder={paths.root}", *overrides, **environment,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return json.loads(paths.job.read_text())["job_id"]

    def state(self, job: str) -> str:
        return self.slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").split()[0]

    def wait_state(self, job: str, *states: str, timeout: float = 60.0) -> str:
        return wait_for(lambda: (state := self.state(job)) in states and state, timeout, f"job {job} to be {states}")

    def processes(self, job: str) -> list[psutil.Process]:
        """Everything that carries the job's id, on whatever node."""
        ids = {row.split("|")[1] for row in self.slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%i|%A").split()}
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"] and process.status() != "zombie":
                    if environment.get("SLURM_JOB_ID") in ids:
                        found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def log(self, paths: RunPaths) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(paths.slurm.glob("*_log.out")))


def wait_for(condition: Callable[[], Any], timeout: float, what: str) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s for {what}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge")
    folder = tmp_path_factory.mktemp("slurm")
    arguments = ["--folder", str(folder)]
    up = subprocess.run(
        [sys.executable, MINISLURM, "up", *arguments, "--nodes", str(NODES), "--requeue-wait", "10",
         "--kill-wait", "15"],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        yield Cluster(Path(up.stdout.split("export SLURM_CONF=")[1].strip()))
    finally:
        subprocess.run([sys.executable, MINISLURM, "down", *arguments], check=True, timeout=180)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny random model, the quickstart's shape."""
    from areal_hpc.config.sft_schema import ScratchConfig, SftConfig, SftInitConfig
    from areal_hpc.launch.sft import make_scratch_model

    folder = tmp_path_factory.mktemp("model") / "scratch"
    scratch = ScratchConfig(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=128, max_positions=1024
    )
    make_scratch_model(SftConfig(seed=3, init=SftInitConfig(scratch=scratch)), folder)
    return folder


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return RunPaths(tmp_path / "a run")


def status(paths: RunPaths) -> dict[str, Any]:
    try:
        return json.loads(paths.status.read_text())
    except (OSError, ValueError):
        return {}
