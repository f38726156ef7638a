"""Signs of life of a rank: who it is, once, and that it lives, every few seconds, in its telemetry.

Written by every rank (started by `main`), read by `areal-hpc status` and the offline tools:
{"c": "start", "v": attempt, "role", "rank", "world_rank", "host", "pid", "cpus", "clock_s", "clock_error_s"}
{"c": "alive", "v": seconds of processor time that the rank's process has used}
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from areal_hpc.telemetry import Telemetry

if TYPE_CHECKING:
    from areal_hpc.mpi.world import World

HEARTBEAT_S = 5.0
SILENT_S = 4 * HEARTBEAT_S
"""Without a sign of life for this long a rank of a running run counts as silent."""


def introduce(telemetry: Telemetry, world: World, attempt: int, clock: tuple[float, float]) -> None:
    """Write who this rank is. `clock`: seconds its clock is ahead of the controller's, and the error."""
    telemetry.value(
        "start", attempt, role=world.role, rank=world.role_rank, world_rank=world.world_rank, host=world.host,
        pid=os.getpid(), cpus=sorted(os.sched_getaffinity(0)), clock_s=round(clock[0], 6),
        clock_error_s=round(clock[1], 6),
    )  # fmt: skip
    # From here on every line says so too: a resumed run repeats steps in the same file.
    telemetry.attempt = attempt
    telemetry.flush()


def start_heartbeat(telemetry: Telemetry, interval_s: float = HEARTBEAT_S) -> threading.Event:
    """Write a sign of life every `interval_s` from a thread that ends with the process; set the event to end it.

    It also brings the rank's other lines to the file while nothing new happens.
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval_s):
            telemetry.value("alive", round(time.process_time(), 2))
            telemetry.flush()

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    return ended
