"""What a run took of the machine: node-, GPU- and core-hours, from Slurm's accounting where there is one.

Without accounting: the nodes, GPUs and cores of the ranks times the run time. Called by `report`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_hpc.analysis.history import History
from areal_hpc.analysis.records import number, read_json
from areal_hpc.analysis.timeline import Timeline
from areal_hpc.config.errors import ConfigError
from areal_hpc.launch import slurm
from areal_hpc.launch.drain import read_events
from areal_hpc.launch.status import CLOCK_SLACK_S, leader_id
from areal_hpc.paths import RunPaths

HOUR_S = 3600.0
SACCT_FIELDS = "JobID,State,End,ElapsedRaw,AllocNodes,AllocCPUS,AllocTRES"
SACCT_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Cost:
    """Hours of everything the run held. `unit` is what the run's curves are drawn against."""

    nodes: int
    gpus: int
    cores: int
    node_hours: float
    gpu_hours: float
    core_hours: float
    source: str

    @property
    def unit(self) -> str:
        return "GPU-hours" if self.gpus else "core-hours"

    @property
    def width(self) -> int:
        """GPUs or cores held at once: hours of run time times this are hours of `unit`."""
        return self.gpus or self.cores

    @property
    def unit_hours(self) -> float:
        return self.gpu_hours if self.gpus else self.core_hours


@dataclass(frozen=True)
class Used:
    """One row of accounting: a component of a job in one of its lives."""

    seconds: float
    nodes: int
    cores: int
    gpus: int


def find_cost(history: History, timeline: Timeline) -> Cost:
    """The cost of a run so far."""
    groups = history.config.groups
    members = (groups.controller, groups.trainer, groups.rollout, groups.reward)
    gpus = sum(group.ranks * group.gpus_per_rank for group in members)
    nodes, cores = _held(timeline)
    if not nodes or len(timeline.ranks) < sum(timeline.num_ranks.values()):
        nodes = sum(group.nodes for group in members)
        cores = sum(group.ranks * group.cpus_per_rank for group in members)
    used = accounting(history)
    if used:
        return Cost(
            nodes, gpus, cores,
            sum(row.seconds * row.nodes for row in used) / HOUR_S,
            sum(row.seconds * row.gpus for row in used) / HOUR_S,
            sum(row.seconds * row.cores for row in used) / HOUR_S,
            "Slurm's accounting (sacct)",
        )  # fmt: skip
    hours = history.clock.total_s / HOUR_S
    return Cost(nodes, gpus, cores, hours * nodes, hours * gpus, hours * cores, "the run time of the ranks")


def _held(timeline: Timeline) -> tuple[int, int]:
    """(nodes, cores) that the ranks said they run on; ranks that share a core count it once."""
    cores: dict[str, set[int]] = {}
    for rank in timeline.ranks:
        if rank.host:
            cores.setdefault(rank.host, set()).update(rank.cpus)
    return len(cores), sum(map(len, cores.values()))


def accounting(history: History) -> list[Used]:
    """What sacct knows of all the run's jobs; [] where there is no job or no accounting."""
    jobs = known_jobs(history.paths)
    if not jobs:
        return []
    try:
        text = slurm.command(
            "sacct", "-X", "-D", "-P", "-j", ",".join(sorted(jobs)), "-o", SACCT_FIELDS, deadline_s=SACCT_DEADLINE_S
        )
    except slurm.SlurmError:
        return []
    return parse_accounting(text, jobs)


def known_jobs(paths: RunPaths) -> dict[str, float]:
    """Job id -> when the run first had that job, over all submissions (seconds since the epoch)."""
    record = read_json(paths.job)
    found = [(str(record.get("job_id", "")), number(record, "submitted"))]
    found += [
        (str(event.get("job_id", "")), number(event, "time"))
        for event in read_events(paths) if event.get("event") == "allocation"
    ]  # fmt: skip
    jobs: dict[str, float] = {}
    for job_id, time in found:
        if job_id:
            jobs[job_id] = min(time, jobs.get(job_id, time))
    return jobs


def parse_accounting(text: str, jobs: Mapping[str, float]) -> list[Used]:
    """`sacct -X -D -P` with a header; rows that ended before the run had that job are another's with its number."""
    lines = text.splitlines()
    names = lines[0].split("|") if lines else []
    found = []
    for line in lines[1:]:
        row = dict(zip(names, line.split("|")))
        try:
            job_id = leader_id(row.get("JobID", ""))
        except ConfigError:
            continue
        end = slurm.parse_time(row.get("End", ""))
        if job_id not in jobs or (end and end < jobs[job_id] - CLOCK_SLACK_S):
            continue
        found.append(
            Used(_count(row, "ElapsedRaw"), _count(row, "AllocNodes"), _count(row, "AllocCPUS"),
                 _gpus(row.get("AllocTRES", "")))
        )  # fmt: skip
    return [row for row in found if row.seconds]


def _count(row: dict[str, str], name: str) -> int:
    return int(row[name]) if row.get(name, "").isdigit() else 0


def _gpus(tres: str) -> int:
    """`billing=8,cpu=8,gres/gpu=4,node=1` holds 4."""
    for part in tres.split(","):
        name, _, value = part.partition("=")
        if name == "gres/gpu" and value.isdigit():
            return int(value)
    return 0
