"""`areal-hpc submit`: checks a configuration on the login node and queues its job.

Writes the run folder (resolved configuration, batch script, job.json); `--dry-run`
writes nothing, prints the script and the node plan, and needs no Slurm.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from areal_hpc import runlock
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import load_config, save_config, training_warnings
from areal_hpc.config.schema import Config
from areal_hpc.launch import slurm
from areal_hpc.launch.drain import slow_drain_warnings
from areal_hpc.launch.plan import check_launch, plan_job
from areal_hpc.launch.preflight import check_files, check_run_folder
from areal_hpc.launch.script import check_log_folder, render_script
from areal_hpc.launch.site import Site, apply_site, load_site
from areal_hpc.launch.status import submit_time, write_record
from areal_hpc.launch.supervise import Supervise
from areal_hpc.paths import RunPaths


def run_submit(config_path: str, overrides: list[str], *, dry_run: bool = False) -> int:
    """Queue the run, or show what would be queued; the exit code."""
    config, site, paths = _load(config_path, overrides)
    if dry_run:
        return _show(config, site, paths)
    if not slurm.available():
        raise ConfigError("no Slurm here (scontrol is not in the PATH): use --dry-run, or tools/minislurm.py")
    plan = plan_job(config)
    _prepare(config, paths)
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from areal_hpc.launch.hetjob import HetExecutor

    try:
        job = HetExecutor(paths.slurm, config, plan, site).submit(Supervise(str(paths.root)))
    except (FailedJobError, FailedSubmissionError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        detail = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")
        raise ConfigError(f"sbatch refused the job: {detail.strip()}") from None
    write_record(paths, job.job_id)
    print(plan.describe())
    print(f"job {job.job_id} is queued; run folder {paths.root}")
    print(f"log {job.paths.stdout}")
    print(f"see: areal-hpc job status {shlex.quote(str(paths.root))}")
    return 0


def prepare_run(config_path: str, overrides: list[str], *, job_id: str, requeued: bool) -> RunPaths:
    """The run folder of a job that a batch script starts; a requeued job finds it as it was."""
    config, _, paths = _load(config_path, overrides)
    if requeued and paths.config.exists():
        runlock.check(paths.lock, take_over=config.run.take_over, job_id=job_id)
    else:
        _prepare(config, paths)
    write_record(paths, job_id, submit_time(job_id))
    return paths


def _load(config_path: str, overrides: list[str]) -> tuple[Config, Site, RunPaths]:
    config = load_config(config_path, overrides)
    site = load_site(config.launch.site)
    config = apply_site(config, site)
    paths = RunPaths(Path(config.run.folder).expanduser().resolve())
    check_log_folder(paths.root)
    plan_job(config)
    for warning in check_launch(config) + slow_drain_warnings(paths, config) + training_warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    return config, site, paths


def _prepare(config: Config, paths: RunPaths) -> None:
    check_run_folder(config, check_files(config).prompts)
    paths.create()
    paths.slurm.mkdir(mode=0o700, exist_ok=True)
    save_config(config, paths.config)


def _show(config: Config, site: Site, paths: RunPaths) -> int:
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(paths.slurm)]
    plan = plan_job(config)
    print(render_script(config, plan, site, log=str(paths.slurm / "%j_0_log.out"), command=command))
    print(plan.describe())
    try:
        check_run_folder(config, check_files(config).prompts)
    except ConfigError as error:
        print(f"warning: submit would refuse this here: {error}", file=sys.stderr)
    return 0
