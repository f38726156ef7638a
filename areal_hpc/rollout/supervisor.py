"""Keeps one engine running: notices death and hangs, restarts it with the committed weights.

Called by the rollout's loop at every turn (`watch`). A restart runs beside the loop and is
watched itself; while it does, `ready` is cleared and callers of the old engine get
EngineDied. Too many failures in too short a time end the run, with the engine's own last
words.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path

from areal_hpc.config.schema import RolloutConfig
from areal_hpc.rollout.engine import EngineDied, RolloutEngine
from areal_hpc.rollout.updates import EngineUpdates

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
TAIL_LINES = 20
TAIL_BYTES = 16 * 1024


class EngineFailures(RuntimeError):
    """The engine failed too often; the message ends with the tail of its log."""


class EngineSupervisor:
    """`restarts` holds causes of restarts that have succeeded and were not yet reported."""

    def __init__(
        self, config: RolloutConfig, engine: RolloutEngine, updates: EngineUpdates, log: Path
    ) -> None:
        self._config = config
        self._engine = engine
        self._updates = updates
        self._log = log
        self._failures: deque[float] = deque()
        self._restart: asyncio.Task[None] | None = None
        self._cause = ""
        self._next_look = 0.0
        self.ready = asyncio.Event()
        self.num_restarts = 0

    async def start(self) -> None:
        """First start; raises EngineFailures if the engine does not come up."""
        try:
            await self._bring_up()
        except EngineDied as error:
            raise EngineFailures(self._last_words(str(error))) from error
        self.ready.set()

    def watch(self) -> str:
        """Look after the engine; the cause of a restart that has just been completed, else "".

        Raises EngineFailures at rollout.max_engine_failures within rollout.failure_window_s.
        """
        now = time.monotonic()
        if self._restart is not None:
            return self._finish_restart()
        if now >= self._next_look:
            self._next_look = now + WATCH_INTERVAL_S
            cause = self._find_failure(now)
            if cause:
                self._begin_restart(cause, now)
        return ""

    def _find_failure(self, now: float) -> str:
        if not self._engine.alive:
            return "its process died"
        waiting = self._engine.num_in_flight and not self._updates.in_progress
        silent_s = now - self._engine.gauges.last_progress
        if waiting and silent_s > self._config.hang_deadline_s:
            return f"no token for {silent_s:.0f} s with {self._engine.num_in_flight} requests in flight"
        return ""

    def _begin_restart(self, cause: str, now: float) -> None:
        self.ready.clear()
        self._failures.append(now)
        while now - self._failures[0] > self._config.failure_window_s:
            self._failures.popleft()
        if len(self._failures) >= self._config.max_engine_failures:
            raise EngineFailures(
                self._last_words(
                    f"the engine failed {len(self._failures)} times within "
                    f"rollout.failure_window_s={self._config.failure_window_s:.0f}, last: {cause}"
                )
            )
        logger.error("engine failure: %s; restarting it", cause)
        self._cause = cause
        self._engine.kill()
        self._updates.engine_lost()
        self._restart = asyncio.create_task(self._bring_up())

    async def _bring_up(self) -> None:
        """An engine that serves the committed weights; EngineDied where that fails."""
        work = asyncio.create_task(self._start_and_restore())
        while not work.done():
            await asyncio.wait({work}, timeout=WATCH_INTERVAL_S)
            if not work.done() and self._engine.died:
                # vLLM leaves calls to a process that was killed without an answer.
                self._engine.kill()
        work.result()

    async def _start_and_restore(self) -> None:
        await self._engine.start()
        try:
            await self._updates.restore()
        except Exception as error:  # whatever it was, a new engine may do better
            self._engine.kill()
            raise EngineDied(f"its weights could not be restored: {error}") from error

    def _finish_restart(self) -> str:
        assert self._restart is not None
        if not self._restart.done():
            return ""
        restart, self._restart = self._restart, None
        error = restart.exception()
        if error is None:
            self.num_restarts += 1
            self.ready.set()
            logger.warning("the engine serves version %d again", self._updates.version)
            return self._cause
        if not isinstance(error, EngineDied):
            raise error
        self._begin_restart(f"{self._cause}, and then: {error}", time.monotonic())
        return ""

    def _last_words(self, message: str) -> str:
        return f"{message}; last lines of {self._log}:\n{tail(self._log)}"


def tail(log: Path, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a log file, "" if there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-num_lines:])
