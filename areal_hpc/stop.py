"""The request to stop, set by a signal handler or a file and read by the controller's loop.

A first request lets the run drain: commit, save, journal. A second one within the
drain ends the process at once; the last checkpoint stays good.
"""

from __future__ import annotations

import os
import signal

WALLTIME_SIGNAL = signal.SIGUSR2
"""Slurm sends it launch.signal_lead_s before the walltime."""


class StopFlag:
    """Set asynchronously, read by polling. `reason` is "" while nobody asked."""

    def __init__(self) -> None:
        self.reason = ""
        self.requeue = False
        self.requests = 0

    def request(self, reason: str, *, requeue: bool = False) -> None:
        """Ask for a stop; `requeue` says that the run should go on in a later allocation."""
        self.requests += 1
        if not self.reason:
            self.reason = reason
            self.requeue = requeue

    def __bool__(self) -> bool:
        return bool(self.reason)


def install_handlers(flag: StopFlag) -> None:
    """In the controller: SIGUSR2, SIGTERM and SIGINT request a stop, the second one ends it at once."""

    def handle(number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        meaning = {"SIGUSR2": "walltime", "SIGTERM": "termination", "SIGINT": "interrupt"}[name]
        # Slurm repeats its signals to every process of a step: only a second Ctrl-C or
        # SIGTERM is a person's (or the scheduler's last) word.
        if flag and number != WALLTIME_SIGNAL:
            os._exit(128 + number)
        flag.request(f"{meaning} ({name})", requeue=number != signal.SIGINT)

    for number in (WALLTIME_SIGNAL, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def ignore_signals() -> None:
    """In trainers and rollouts: outlive the step's signals until the controller says stop."""
    for number in (WALLTIME_SIGNAL, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


FLAG = StopFlag()
"""This process's flag: a signal handler can reach nothing else."""
