"""How long a stop takes, measured and foreseen, against launch.signal_lead_s.

Reads the supervisor's events and the trainer lead's telemetry in the run folder. Used by
the supervisor (while the run trains) and by submit (before it is queued again).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from areal_hpc.config.schema import Config
from areal_hpc.launch.plan import END_MARGIN_S
from areal_hpc.paths import RunPaths

TAIL_BYTES = 256 * 1024
PARTS = {"train.step": "d", "weights.publish": "d", "checkpoint.seconds": "v"}
"""What may stand between a stop and its end: a training step, a publication, the save."""


def slow_drain_warnings(paths: RunPaths, config: Config) -> list[str]:
    """What earlier stops of this run say about the lead time."""
    drains = [event["seconds"] for event in read_events(paths) if event.get("event") == "drained"]
    if not drains or fits(max(drains), config):
        return []
    return [f"a stop of this run took {max(drains):.0f} s, {_advice(config)}"]


def expected_drain_warnings(paths: RunPaths, config: Config) -> list[str]:
    """What the run has measured so far says about its next stop."""
    seconds = expected_drain(paths)
    if fits(seconds, config):
        return []
    return [f"a stop would take about {seconds:.0f} s (a training step, a publication and a save), {_advice(config)}"]


def expected_drain(paths: RunPaths) -> float:
    """Seconds: the longest recent training step, publication and save, one after the other."""
    longest = dict.fromkeys(PARTS, 0.0)
    for record in _tail(paths.spans("trainer", 0)):
        name = record.get("s") or record.get("c")
        if name in PARTS:
            longest[name] = max(longest[name], float(record.get(PARTS[name], 0.0)))
    return sum(longest.values())


def fits(seconds: float, config: Config) -> bool:
    return seconds + END_MARGIN_S <= config.launch.signal_lead_s


def read_events(paths: RunPaths) -> list[dict[str, Any]]:
    """What the supervisors of this run's allocations wrote, oldest first."""
    return _tail(paths.slurm_events, None)


def _advice(config: Config) -> str:
    return (
        f"which does not fit into launch.signal_lead_s={config.launch.signal_lead_s} with {END_MARGIN_S} s to "
        "leave: raise launch.signal_lead_s"
    )


def _tail(path: Path, num_bytes: int | None = TAIL_BYTES) -> list[dict[str, Any]]:
    """Whole JSON lines at the end of a file that may be growing, or end in a line cut short."""
    try:
        with open(path, "rb") as stream:
            if num_bytes is not None:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - num_bytes))
            lines = stream.read().splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
