"""Signs of life between the controller and every other rank, sent by a thread of its own.

A process that is stopped, or whose node is gone, says nothing and breaks nothing: the
others would wait for it in a collective until some far deadline, and name the wrong one.
Every rank tells the controller that it lives and the controller tells every rank; who is
silent for too long is named and the world is ended. Started by `main` around role.run().
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from areal_hpc.messages import Alive
from areal_hpc.mpi.world import World

BEATS = 6
"""Signs of life within the deadline."""


class Pulse:
    """Beats until `stop`. `on_silence` is called once, in the thread, with a TimeoutError that names the rank."""

    def __init__(self, world: World, deadline_s: float, on_silence: Callable[[TimeoutError], None]) -> None:
        self._world, self._deadline_s, self._on_silence = world, deadline_s, on_silence
        others = {*world.trainer_ranks, *world.rollout_ranks, *world.reward_ranks}
        self._watched = sorted(others) if world.role == "controller" else [world.controller_rank]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread sends nothing any more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        interval_s = self._deadline_s / BEATS
        signs = SignsOfLife(self._watched, self._deadline_s, time.monotonic())
        while not self._stopped.wait(interval_s):
            for rank in self._watched:
                self._world.channel.send(rank, Alive())
            silent = signs.look(self._world.channel.heard(), time.monotonic())
            if silent is not None:
                self._on_silence(
                    TimeoutError(
                        f"no sign of life from {self._world.describe(silent)} for {self._deadline_s:g} s "
                        "(run.silence_deadline_s): it is stopped, or its node is lost"
                    )
                )
                return


class SignsOfLife:
    """Who has been silent for too long. Pure: time is an argument."""

    def __init__(self, ranks: list[int], deadline_s: float, now: float) -> None:
        self._deadline_s = deadline_s
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._last_look = now

    def look(self, heard: set[int], now: float) -> int | None:
        """A rank to be given up, None if there is none; `heard` since the last look.

        Time in which this process itself did not run (it was stopped as well, or starved)
        counts as one interval: the others' messages may still lie unread.
        """
        passed = min(now - self._last_look, 2 * self._deadline_s / BEATS)
        self._last_look = now
        for rank in self._silent_s:
            self._silent_s[rank] = 0.0 if rank in heard else self._silent_s[rank] + passed
        late = [rank for rank, silent_s in self._silent_s.items() if silent_s > self._deadline_s]
        return max(late, key=self._silent_s.__getitem__) if late else None
