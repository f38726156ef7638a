"""The state of a run from its folder alone: what `areal-hpc status` shows.

Reads status.json, metrics.jsonl, the ends of the telemetry files, the supervisor's events
and the ranks' logs; asks Slurm only for a run that was submitted, and does without an
answer. `inspect` reads; `status_view` prints.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.analysis.history import History, last_time, load_history, rank_of, telemetry_files
from areal_hpc.analysis.records import number, read_json, tail
from areal_hpc.heartbeat import SILENT_S
from areal_hpc.paths import RunPaths

RECENT_STEPS = 10
"""Steps that rates and the estimate of the end are taken from."""
LOST_S = 120.0
"""A run without any sign of life for this long, and without a job in Slurm, has failed."""
LOG_TAIL_BYTES = 32 * 1024
MAX_ERRORS = 3
ENDED = ("finished", "stopped", "failed")


@dataclass
class Rank:
    """Last sign of life of one rank, seconds ago; `silent` if it owes one."""

    role: str
    rank: int
    host: str = ""
    age_s: float | None = None
    silent: bool = False
    doing: str = ""

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass
class RunStatus:
    """All that is known; rates in tokens per second of wall time, times in seconds."""

    run: str
    name: str
    state: str
    """queued, starting, running, stopping, silent, stopped, finished or failed."""
    reason: str = ""
    age_s: float | None = None
    """Seconds since the controller's last status."""
    restarts: int = 0
    """Starts of the ranks after the first."""
    train_step: int = 0
    total_steps: int = 0
    version: int = 0
    live_version: int = 0
    reward: float | None = None
    accuracy: float | None = None
    heldout_accuracy: float | None = None
    heldout_accuracy_first: float | None = None
    generated_tokens_s: float | None = None
    trained_tokens_s: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    staleness_bound: int = 0
    ready_groups: int = 0
    groups_per_batch: int = 1
    groups_under_way: int = 0
    places: int = 0
    places_taken: int = 0
    waiting_for: str = ""
    bottleneck: str = ""
    step_s: float | None = None
    left_s: float | None = None
    """Estimate until the last step."""
    allocation_left_s: float | None = None
    job: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def silent_ranks(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.silent]

    @property
    def exit_code(self) -> int:
        """1 for a run that has failed or in which somebody is silent."""
        return 1 if self.state in ("failed", "silent") or self.silent_ranks else 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(folder: str | Path, now: float | None = None) -> RunStatus:
    """Look at a run; ConfigError if the folder is none."""
    now = time.time() if now is None else now
    history = load_history(folder)
    paths, last = history.paths, read_json(history.paths.status)
    found = RunStatus(str(folder), history.name, "")
    found.total_steps = history.config.run.total_steps
    found.restarts = max(0, len(history.lives) - 1, len(history.begun) - 1)
    found.staleness_bound = history.bound
    found.groups_per_batch = max(1, history.config.trainer.batch_size // history.config.rollout.group_size)
    _take_controller(found, last, now)
    _take_steps(found, history)
    found.ranks = _ranks(paths, last, now)
    _take_allocation(found, paths, now)
    found.state, found.reason = _state(found, paths, last, now)
    if found.state not in ("running", "stopping", "starting", "silent"):
        for rank in found.ranks:
            rank.silent = False
    if found.state in ("failed", "silent"):
        found.errors = last_errors(paths)
    _estimate(found)
    return found


# ---- parts -----------------------------------------------------------------------------


def _take_controller(found: RunStatus, last: dict[str, Any], now: float) -> None:
    """What the controller said last."""
    if not last:
        return
    found.age_s = max(0.0, now - number(last, "time"))
    for name in ("train_step", "total_steps", "version", "live_version", "ready_groups", "groups_under_way", "places"):
        setattr(found, name, int(number(last, name, getattr(found, name))))
    found.places_taken = int(number(last, "trajectories_outstanding"))
    found.waiting_for = str(last.get("waiting_for", ""))
    found.generated_tokens_s = number(last, "gen_tokens_per_s") if "gen_tokens_per_s" in last else None
    counters = last.get("counters")
    found.counters = {str(k): float(v) for k, v in counters.items()} if isinstance(counters, dict) else {}


def _take_steps(found: RunStatus, history: History) -> None:
    """Reward, accuracy, speed and staleness of the last steps."""
    steps = list(history.steps.values())
    if history.evals:
        figures = [number(record, "accuracy") for record in history.evals.values()]
        found.heldout_accuracy_first, found.heldout_accuracy = figures[0], figures[-1]
    if not steps:
        return
    newest, recent = steps[-1], steps[-RECENT_STEPS:]
    found.train_step = max(found.train_step, int(number(newest, "train_step")))
    found.reward, found.accuracy = number(newest, "reward_mean"), number(newest, "accuracy")
    found.staleness_mean, found.staleness_max = number(newest, "staleness_mean"), number(newest, "staleness_max")
    # Only steps of one life follow one another without a pause.
    recent = [record for record in recent if record.get("attempt") == newest.get("attempt")]
    seconds = number(recent[-1], "time") - number(recent[0], "time")
    if len(recent) > 1 and seconds > 0:
        found.step_s = seconds / (len(recent) - 1)
        found.trained_tokens_s = sum(number(record, "trainer/num_tokens") for record in recent[1:]) / seconds
        waited = sum(number(record, "wait_s") for record in recent[1:])
        share = waited / seconds
        if share > 0.1:
            found.bottleneck = f"generation: the trainer waited {share:.0%} of the last {len(recent) - 1} steps"
        elif found.places and found.places_taken >= found.places - history.config.rollout.group_size:
            found.bottleneck = "training: all places of the staleness bound are taken"


def _ranks(paths: RunPaths, last: dict[str, Any], now: float) -> list[Rank]:
    """Every rank that has a file or that the controller knows, with its last sign of life."""
    hosts, reports = {}, {}
    for world_rank, sign in sorted((last.get("ranks") or {}).items(), key=lambda item: int(item[0])):
        role = str(sign.get("role", ""))
        rank = sum(1 for other, _ in hosts if other == role)
        hosts[role, rank] = str(sign.get("host", ""))
        reports[role, rank] = number(sign, "time")
    found = {key: Rank(*key, host=host) for key, host in hosts.items()}
    full: set[tuple[str, int]] = set()
    for path in telemetry_files(paths):
        role, rank = rank_of(path)
        entry = found.setdefault((role, rank), Rank(role, rank))
        newest = tail(path, 4096)
        # What it told the controller counts as well: a telemetry file may be full.
        entry.age_s = max(0.0, now - max(last_time(path), reports.get((role, rank), 0.0)))
        entry.doing = _doing(newest)
        if newest and newest[-1].get("c") == "telemetry.full":
            full.add((role, rank))
    # Compared with the liveliest rank, not with this machine's clock, which may be wrong.
    ages = [entry.age_s for entry in found.values() if entry.age_s is not None]
    for key, entry in found.items():
        entry.silent = key not in full and entry.age_s is not None and entry.age_s - min(ages) > SILENT_S
    order = {"controller": 0, "trainer": 1, "rollout": 2}
    return sorted(found.values(), key=lambda entry: (order.get(entry.role, 3), entry.rank))


def _doing(records: list[dict[str, Any]]) -> str:
    """The last span in words."""
    for record in reversed(records):
        if "s" in record:
            step = record.get("train_step", record.get("version"))
            return f"{record['s']}" + (f" {step}" if isinstance(step, (int, float)) else "")
    return ""


def _take_allocation(found: RunStatus, paths: RunPaths, now: float) -> None:
    """Time until the walltime, from the supervisor's own note of the allocation."""
    events = tail(paths.slurm_events)
    found.job = str(read_json(paths.job).get("job_id", ""))
    for event in reversed(events):
        if event.get("event") == "allocation":
            found.job = str(event.get("job_id", found.job))
            if isinstance(event.get("seconds"), (int, float)):
                found.allocation_left_s = number(event, "time") + number(event, "seconds") - now
            return


def _state(found: RunStatus, paths: RunPaths, last: dict[str, Any], now: float) -> tuple[str, str]:
    """(state, why): the controller's word if it is fresh or final, else the supervisor's and Slurm's."""
    said, reason = str(last.get("state", "")), str(last.get("reason", ""))
    verdict = next((e for e in reversed(tail(paths.slurm_events)) if e.get("event") in ("decision", "allocation")), {})
    if said == "finished":
        return "finished", reason
    slurm_state = _slurm_state(paths) if found.job and (found.age_s is None or found.age_s > SILENT_S) else ""
    if slurm_state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return "queued", f"job {found.job} waits in the queue"
    if said == "stopped":
        return "stopped", reason
    if verdict.get("action") == "fail" and number(verdict, "time") >= number(last, "time"):
        return "failed", str(verdict.get("text", ""))
    if found.age_s is not None and found.age_s <= SILENT_S:
        return said or "running", reason
    if found.age_s is None and not found.ranks:
        where = f"job {found.job} is {slurm_state.lower()}" if slurm_state else "no rank has reported yet"
        return ("starting" if slurm_state in ("", "RUNNING", "CONFIGURING") else "failed"), where
    quiet = min([rank.age_s for rank in found.ranks if rank.age_s is not None] + [found.age_s or now])
    if slurm_state == "RUNNING" and quiet <= SILENT_S:
        return "starting", "the ranks live, the controller has not reported yet"
    if slurm_state and slurm_state not in ("RUNNING", "COMPLETING", "UNKNOWN"):
        return "failed", f"job {found.job} ended as {slurm_state} and the run had not finished"
    if _holder_is_gone(paths) or quiet > LOST_S:
        return "failed", f"no sign of life for {quiet:.0f} s and no word of an end"
    if quiet <= SILENT_S:
        return "silent", f"the controller is silent for {found.age_s or quiet:.0f} s, other ranks live"
    return "silent", f"no sign of life for {quiet:.0f} s"


def _slurm_state(paths: RunPaths) -> str:
    """Slurm's state of the run's job; "" where it cannot be asked."""
    from areal_hpc.launch.status import find_job, job_status

    try:
        record, _ = find_job(str(paths.root))
        return job_status(record.job_id, record.submitted).state
    except (ValueError, RuntimeError):
        return ""


def _holder_is_gone(paths: RunPaths) -> bool:
    """Whether the process that holds the run's lock ran on this machine and does not any more."""
    holder = read_json(paths.lock)
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    return not Path(f"/proc/{holder['pid']}").exists()


def _estimate(found: RunStatus) -> None:
    if found.step_s is not None and found.state in ("running", "queued", "stopping"):
        found.left_s = max(0, found.total_steps - found.train_step) * found.step_s


def last_errors(paths: RunPaths) -> list[str]:
    """The last line of each traceback at the end of a rank's log: what ended the run."""
    errors = []
    for log in sorted(paths.logs.glob("*.log")):
        try:
            with open(log, "rb") as stream:
                stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
                text = stream.read(LOG_TAIL_BYTES).decode(errors="replace")
        except OSError:
            continue
        found = re.findall(r"^(?:[\w.]+(?:Error|Exception|Exit|Interrupt)\b.*)$", text.rpartition("Traceback")[2], re.M)
        if "Traceback" in text and found:
            errors.append(f"{log.stem}: {found[-1].strip()[:300]}")
    return errors[:MAX_ERRORS]
