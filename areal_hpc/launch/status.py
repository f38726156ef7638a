"""State of a submitted job, right for heterogeneous jobs; `areal-hpc job` prints and acts on it.

squeue knows jobs that wait, run or ended minutes ago; sacct (where accounting is on)
remembers the rest. Both write the components of job 123 as rows `123+0`, `123+1`, ...
An id may come back after the counter was reset, and a requeued job leaves a row for each
of its lives: only the last submission counts, and none from before we submitted.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.launch import slurm
from areal_hpc.launch.hostlist import expand
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import replace_json

SQUEUE_FORMAT = "%i|%T|%N|%r"
SACCT_FIELDS = "JobID,State,NodeList,Submit"
UNKNOWN = "UNKNOWN"
ACTIVE = (
    "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT",
    "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
)  # fmt: skip
"""States of a job that has not ended, the most telling first."""
CLOCK_SLACK_S = 120.0
"""Clocks of the login node and of slurmctld may differ by this much."""


@dataclass(frozen=True)
class Row:
    """One component in the output of squeue or sacct."""

    job_id: str
    offset: int
    state: str
    nodes: tuple[str, ...]
    reason: str = ""
    submitted: float = 0.0


@dataclass(frozen=True)
class JobStatus:
    """A whole job: `state` sums its components up."""

    job_id: str
    state: str
    rows: tuple[Row, ...]
    problem: str = ""
    """Why Slurm could not be asked, where the state is UNKNOWN."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for row in self.rows for node in row.nodes)

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


def job_status(job_id: str, submitted: float = 0.0) -> JobStatus:
    """What Slurm says of job `job_id` now; UNKNOWN when it says nothing."""
    leader = leader_id(job_id)
    problem = ""
    for ask in (_ask_squeue, _ask_sacct):
        try:
            rows = [row for row in ask(leader) if row.job_id == leader]
        except slurm.SlurmError as error:
            problem = problem or str(error)
            continue
        rows = latest(rows, submitted)
        if rows and summarize(rows) != UNKNOWN:
            return JobStatus(leader, summarize(rows), tuple(rows))
    return JobStatus(leader, UNKNOWN, (), problem)


def leader_id(text: str) -> str:
    """`123`, `123+1` and `123.0` all belong to job 123; ConfigError for what is no job id."""
    match = re.fullmatch(r"(\d+)(?:\+\d+)?(?:\.\w+)?", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is neither a run folder with a job nor a job id")
    return match.group(1)


def _ask_squeue(leader: str) -> list[Row]:
    return parse_squeue(slurm.command("squeue", "-h", "-a", "-t", "all", "-j", leader, "-o", SQUEUE_FORMAT))


def _ask_sacct(leader: str) -> list[Row]:
    return parse_sacct(slurm.command("sacct", "-X", "-D", "-P", "-j", leader, "-o", SACCT_FIELDS))


def parse_squeue(text: str) -> list[Row]:
    """Lines of SQUEUE_FORMAT."""
    rows = []
    for line in text.splitlines():
        identity, state, nodes, reason = (line.split("|", 3) + ["", "", ""])[:4]
        parsed = _component(identity)
        if parsed is not None:
            rows.append(Row(*parsed, state=_state(state), nodes=_nodes(nodes), reason=reason.strip()))
    return rows


def parse_sacct(text: str) -> list[Row]:
    """`sacct -P` with a header; steps (`123+0.batch`) and rows that are no component are left out."""
    lines = text.splitlines()
    if not lines:
        return []
    names = lines[0].split("|")
    rows = []
    for line in lines[1:]:
        values = dict(zip(names, line.split("|")))
        parsed = _component(values.get("JobID", ""))
        if parsed is not None:
            rows.append(
                Row(
                    *parsed,
                    state=_state(values.get("State", "")),
                    nodes=_nodes(values.get("NodeList", "")),
                    submitted=slurm.parse_time(values.get("Submit", "")),
                )
            )
    return rows


def latest(rows: list[Row], submitted: float = 0.0) -> list[Row]:
    """The last life of every component, in order; lives from before `submitted` are another job's."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.submitted and row.submitted < submitted - CLOCK_SLACK_S:
            continue
        if row.offset not in best or row.submitted >= best[row.offset].submitted:
            best[row.offset] = row
    return [best[offset] for offset in sorted(best)]


def summarize(rows: list[Row]) -> str:
    """One state for all components.

    A job that is not over in one component is not over. When all have ended the leader
    (offset 0) decides: its batch step is the run, the others are only released.
    """
    states = [row.state for row in rows]
    for state in ACTIVE:
        if state in states:
            return state
    known = [row.state for row in rows if row.state != UNKNOWN]
    leader = [row.state for row in rows if row.offset == 0 and row.state != UNKNOWN]
    return (leader or known or [UNKNOWN])[0]


def _component(identity: str) -> tuple[str, int] | None:
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", identity.strip())
    return (match.group(1), int(match.group(2) or 0)) if match else None


def _state(text: str) -> str:
    """`CANCELLED by 1000` and `CANCELLED+` are CANCELLED; nothing is UNKNOWN."""
    words = text.strip().rstrip("+").split()
    return words[0].upper() if words else UNKNOWN


def _nodes(text: str) -> tuple[str, ...]:
    text = text.strip()
    return () if text in ("", "(null)", "None assigned") else tuple(expand(text))


# ---- areal-hpc job ---------------------------------------------------------------


@dataclass(frozen=True)
class JobRecord:
    """What the run folder knows of its job."""

    job_id: str
    submitted: float


def write_record(paths: RunPaths, job_id: str, submitted: float | None = None) -> None:
    """`submitted`: seconds since the epoch, now if None."""
    replace_json(paths.job, {"job_id": job_id, "submitted": time.time() if submitted is None else submitted})


def submit_time(job_id: str) -> float | None:
    """When this job came into the queue, hours before it started perhaps; None if Slurm does not say."""
    try:
        times = [component.submitted for component in slurm.components(job_id)]
    except slurm.SlurmError:
        return None
    return min((time for time in times if time), default=None)


def find_job(target: str) -> tuple[JobRecord, RunPaths | None]:
    """The job of a run folder, or of a job id."""
    paths = RunPaths(Path(target).expanduser())
    if not paths.root.is_dir():
        return JobRecord(leader_id(target), 0.0), None
    try:
        values = json.loads(paths.job.read_text(encoding="utf-8"))
        return JobRecord(leader_id(str(values["job_id"])), float(values["submitted"])), paths
    except (OSError, ValueError, KeyError):
        raise ConfigError(f"{target} has no Slurm job (no readable {paths.job})") from None


def active_job(paths: RunPaths) -> JobStatus | None:
    """The folder's job if it waits or runs, and is not the one that this process is in."""
    if not slurm.available() or not paths.job.exists():
        return None
    try:
        record, _ = find_job(str(paths.root))
    except ConfigError:
        return None
    if record.job_id == os.environ.get("SLURM_JOB_ID"):
        return None
    status = job_status(record.job_id, record.submitted)
    # A job that is completing has ended, but for Slurm's cleaning.
    return status if status.active and status.state != "COMPLETING" else None


def run_job_command(action: str, target: str) -> int:
    """`areal-hpc job ACTION TARGET`; the exit code."""
    record, paths = find_job(target)
    try:
        return _ACTIONS[action](record, paths)
    except slurm.SlurmError as error:
        raise ConfigError(str(error)) from None


def _show(record: JobRecord, paths: RunPaths | None) -> int:
    status = job_status(record.job_id, record.submitted)
    print(f"job {status.job_id}: {status.state}" + (f" ({status.problem})" if status.problem else ""))
    for row in status.rows:
        reason = f" ({row.reason})" if row.reason not in ("", "None") else ""
        print(f"  component {row.offset}: {row.state}{reason} {','.join(row.nodes)}")
    if paths is not None:
        print(f"  run: {run_state(paths)}")
    return 0


def run_state(paths: RunPaths) -> str:
    """The controller's last status in a few words."""
    try:
        status = json.loads(paths.status.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "no rank has reported yet"
    age = time.time() - float(status.get("time", 0.0))
    return f"{status.get('state', '?')} at step {status.get('train_step', 0)}, reported {age:.0f} s ago"


def _cancel(record: JobRecord, paths: RunPaths | None) -> int:
    slurm.cancel(record.job_id)
    print(f"cancelled job {record.job_id} with all its components")
    return 0


def _stop(record: JobRecord, paths: RunPaths | None) -> int:
    slurm.command("scancel", "--signal=INT", record.job_id)
    print(f"job {record.job_id} commits, saves and ends; continue later with run.on_existing=resume")
    return 0


def _requeue(record: JobRecord, paths: RunPaths | None) -> int:
    if job_status(record.job_id, record.submitted).state == "RUNNING":
        slurm.command("scancel", "--batch", "--signal=USR2", record.job_id)
        print(f"job {record.job_id} commits, saves and goes back into the queue")
    else:
        slurm.requeue(record.job_id)
        print(f"job {record.job_id} is back in the queue")
    return 0


def _logs(record: JobRecord, paths: RunPaths | None) -> int:
    if paths is None:
        raise ConfigError(f"give the run folder, not the job id {record.job_id}, to find its logs")
    logs = sorted(paths.slurm.glob("*_log.out")) + sorted(paths.logs.glob("*.log"))
    print("\n".join(map(str, logs)) or f"no log in {paths.slurm} or {paths.logs} yet")
    return 0


_ACTIONS = {"status": _show, "cancel": _cancel, "stop": _stop, "requeue": _requeue, "logs": _logs}
