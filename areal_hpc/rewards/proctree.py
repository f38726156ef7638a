"""Kills a process with all its descendants, however they detached themselves.

Reads /proc. Called by `pool` for hung workers (which collect the orphans of their
checks, so that the tree is whole) and by `sandbox` where there is no pid namespace.
"""

from __future__ import annotations

import os
import signal
import time

KILL_DEADLINE_S = 5.0


def descendants(root: int) -> list[int]:
    """Every live descendant of `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            parent, alive = _parent_and_life(int(entry))
            if alive:
                children.setdefault(parent, []).append(int(entry))
    found, pending = [], [root]
    while pending:
        for pid in children.get(pending.pop(), []):
            found.append(pid)
            pending.append(pid)
    return found


def kill_descendants(root: int) -> None:
    """Stop and kill every descendant of `root`, a collector of orphans, until none is left."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    while (pids := descendants(root)) and time.monotonic() < deadline:
        # Stopped first, so that none forks while the others are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                _send(pid, number)


def kill_tree(root: int) -> None:
    """Kill `root` and all its descendants. `root` is stopped first, so that it starts no more."""
    _send(root, signal.SIGSTOP)
    kill_descendants(root)
    _send(root, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _parent_and_life(pid: int) -> tuple[int, bool]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # The name in brackets may hold anything: fields start after the last bracket.
            fields = stream.read().rpartition(b")")[2].split()
        # A process whose first thread has ended looks like a zombie while others run on.
        alive = fields[0] not in (b"Z", b"X") or len(os.listdir(f"/proc/{pid}/task")) > 1
        return int(fields[1]), alive
    except (OSError, IndexError, ValueError):
        return 0, False
