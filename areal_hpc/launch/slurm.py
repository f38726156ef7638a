"""Slurm's commands as functions: what they print, parsed; every call has a deadline.

Reads job, node and step states; acts with scancel and `scontrol requeue`. Used by the
supervisor inside a job and by submit, status and doctor on a login node. The parsers are
pure and tested against recorded output.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from areal_hpc.launch.hostlist import expand

T = TypeVar("T")

COMMAND_DEADLINE_S = 60.0
BAD_NODE_WORDS = ("down", "drain", "fail", "error", "unknown", "power", "reboot", "maint", "*")
"""Any of these in a node's state: nothing may be started there. `*` marks a node that does not answer."""


class SlurmError(RuntimeError):
    """A Slurm command failed; the message holds its last line."""


@dataclass(frozen=True)
class Component:
    """One component of a heterogeneous job (or a whole simple job, offset 0)."""

    job_id: str
    offset: int
    state: str
    reason: str
    nodes: tuple[str, ...]
    end_time: float
    """Seconds since the epoch; 0 while it is unknown."""
    restarts: int
    submitted: float
    """When it came into the queue (last, if it was requeued); seconds since the epoch, 0 if unknown."""


def available() -> bool:
    return shutil.which("scontrol") is not None


def command(*arguments: str, deadline_s: float = COMMAND_DEADLINE_S) -> str:
    """Standard output of a Slurm command; SlurmError when it fails, is missing or late."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SlurmError(f"{arguments[0]} is not installed here") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"waited {deadline_s:.0f} s for {arguments[0]} from the Slurm controller") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        said = lines[-1] if lines[-1].startswith(arguments[0]) else f"{arguments[0]}: {lines[-1]}"
        raise SlurmError(said)
    return done.stdout


def patiently(call: Callable[[], T], attempts: int = 5, pause_s: float = 5.0) -> T:
    """The result of `call`, tried again while slurmctld is busy or restarts."""
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except SlurmError:
            if attempt == attempts:
                raise
            time.sleep(pause_s)
    raise AssertionError("unreachable")


# ---- jobs ------------------------------------------------------------------------


def components(leader: str) -> list[Component]:
    """The components of a job, in order, as slurmctld sees them now."""
    return parse_job_records(command("scontrol", "-o", "show", "job", leader))


def parse_job_records(text: str) -> list[Component]:
    """`scontrol -o show job ID`: one record a line, of all components of a heterogeneous job."""
    found = []
    for line in text.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        if "JobId" not in fields:
            continue
        nodes = fields.get("NodeList", "")
        found.append(
            Component(
                job_id=fields["JobId"],
                offset=int(fields.get("HetJobOffset", 0)),
                state=fields.get("JobState", "UNKNOWN"),
                reason=fields.get("Reason", ""),
                nodes=() if nodes in ("", "(null)") else tuple(expand(nodes)),
                end_time=parse_time(fields.get("EndTime", "")),
                restarts=int(fields.get("Restarts", 0)),
                submitted=parse_time(fields.get("SubmitTime", "")),
            )
        )
    return sorted(found, key=lambda component: component.offset)


def parse_time(text: str) -> float:
    """Slurm's local time in seconds since the epoch; 0 for Unknown, N/A and the like."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0


def requeue(leader: str) -> None:
    """Put the whole job back in the queue; Slurm then ends this allocation."""
    command("scontrol", "requeue", leader)


def cancel(leader: str) -> None:
    """End all components; cancelling a component that is not the leader would be refused."""
    command("scancel", leader)


def has_step(leader: str) -> bool:
    """Whether any step but the batch script's runs in the job."""
    steps = command("squeue", "-h", "-s", "-j", leader, "-o", "%i").split()
    return any(re.search(r"\.\d+$", step) for step in steps)


# ---- nodes -----------------------------------------------------------------------


def healthy_nodes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `names` on which Slurm can start something, in the given order."""
    if not names:
        return ()
    states = parse_node_states(command("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T"))
    return tuple(name for name in names if usable(states.get(name, "unknown")))


def parse_node_states(text: str) -> dict[str, str]:
    """`sinfo -N -o "%N %T"`: a node appears once per partition, with one state."""
    return {fields[0]: fields[1].lower() for fields in map(str.split, text.splitlines()) if len(fields) == 2}


def usable(state: str) -> bool:
    return not any(word in state for word in BAD_NODE_WORDS)
