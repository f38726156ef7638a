"""submitit for one heterogeneous job: executor, job and status watcher. Called by `submit`.

submitit knows jobs and arrays only. Here its batch script has one component per node
group and runs the supervisor in the batch step, so that there is one task and one result;
its watcher asks `status`, which understands the rows `123+0`, `123+1`.
"""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from areal_hpc.config.schema import Config
from areal_hpc.launch.plan import JobPlan
from areal_hpc.launch.script import render_script
from areal_hpc.launch.site import Site
from areal_hpc.launch.status import job_status


class HetWatcher(SlurmInfoWatcher):
    """States of heterogeneous jobs by their leader's id, from squeue and sacct."""

    def update(self) -> None:
        for job_id in self._registered - self._finished:
            status = job_status(job_id)
            self._info_dict[job_id] = {
                "JobID": job_id,
                "State": status.state,
                "NodeList": ",".join(status.nodes),
            }
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)
        self._num_calls += 1
        self._last_status_check = time.time()


class HetJob(SlurmJob):
    """A submitted job; `cancel` ends all components, `paths.stdout` is the batch step's log."""

    watcher = HetWatcher(delay_s=60)


class HetExecutor(SlurmExecutor):
    """Submits the supervisor as a heterogeneous job of three components."""

    job_class = HetJob

    def __init__(self, folder: Path, config: Config, plan: JobPlan, site: Site) -> None:
        super().__init__(folder, max_num_timeout=config.launch.max_requeues)
        self._config, self._plan, self._site = config, plan, site
        # submitit counts a stop against max_num_timeout by this walltime, minutes.
        self.parameters["time"] = config.launch.time_min

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render_script(
            self._config, self._plan, self._site, log=batch_log(Path(self.folder)), command=shlex.split(command)
        )

    def _num_tasks(self) -> int:
        return 1

    @staticmethod
    def _set_job_permissions(folder: Path) -> None:
        os.chmod(folder, 0o700)


def batch_log(folder: Path) -> str:
    """Where submitit looks for the first task's output."""
    return str(folder / "%j_0_log.out")
