"""The reward rank: scores the answers of all rollouts (`groups.reward`; without it there are none).

    ScoreRequest -> RewardService (a pool of processes) -> Scored

One asyncio loop, as many requests under way as rollouts have sent. Called by `main` with
the rank's world.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from areal_hpc.config.schema import Config
from areal_hpc.messages import RewardReady, RewardStatus, Scored, ScoreRequest, Stop
from areal_hpc.paths import RunPaths
from areal_hpc.rewards.registry import RewardError, UnscorableGold
from areal_hpc.rewards.service import RewardService
from areal_hpc.telemetry import Telemetry

if TYPE_CHECKING:
    from areal_hpc.mpi.world import World

logger = logging.getLogger(__name__)

POLL_S = 0.01
STATUS_INTERVAL_S = 1.0
MIN_IDLE_S = 0.05
"""Shorter stretches without requests are not recorded."""


def run(config: Config, world: World, paths: RunPaths, telemetry: Telemetry) -> None:
    """Serve until the controller says Stop; any error ends the rank."""
    asyncio.run(_run(config, world, telemetry))


async def _run(config: Config, world: World, telemetry: Telemetry) -> None:
    async with RewardService(config.rewards, telemetry) as service:
        await RewardWorker(world, service, telemetry).serve()


class RewardWorker:
    """State of the loop: the requests under way."""

    def __init__(self, world: World, service: RewardService, telemetry: Telemetry) -> None:
        self._world = world
        self._service = service
        self._telemetry = telemetry
        self._requests: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._next_status = 0.0
        self._idle_since: float | None = None

    async def serve(self) -> None:
        """The rank's loop."""
        self._tell_controller(RewardReady(self._world.role_rank))
        while not self._stopped:
            self.receive_messages()
            self.collect_requests()
            self.note_idleness(is_idle=not self._requests)
            self.report_status()
            await asyncio.sleep(POLL_S)
        self.note_idleness(is_idle=False)
        # Whose rollout has left: nobody waits for these scores.
        for task in self._requests:
            task.cancel()

    # -- steps ---------------------------------------------------------------------

    def receive_messages(self) -> None:
        for source, message in self._world.channel.poll():
            match message:
                case ScoreRequest():
                    self._requests.add(asyncio.create_task(self._score(source, message)))
                case Stop():
                    self._stopped = True
                case _:
                    raise RuntimeError(f"unexpected {type(message).__name__} from {self._world.describe(source)}")

    def collect_requests(self) -> None:
        for task in [task for task in self._requests if task.done()]:
            self._requests.discard(task)
            task.result()

    def note_idleness(self, *, is_idle: bool) -> None:
        """Record each stretch in which there was nothing to score."""
        now = time.time()
        if is_idle and self._idle_since is None:
            self._idle_since = now
        elif not is_idle and self._idle_since is not None:
            if now - self._idle_since >= MIN_IDLE_S:
                self._telemetry.record_span("reward.idle", self._idle_since, now - self._idle_since)
            self._idle_since = None

    def report_status(self) -> None:
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + STATUS_INTERVAL_S
        stats = self._service.stats()
        self._telemetry.value("reward.seconds", stats["seconds"], checks=stats["checks"])
        counters = {name: float(value) for name, value in stats.items()}
        self._tell_controller(RewardStatus(self._world.role_rank, counters | {"requests": float(len(self._requests))}))

    # -- work ----------------------------------------------------------------------

    async def _score(self, source: int, request: ScoreRequest) -> None:
        """Answer one request; what is the prompt's or the reward's fault goes to the rollout that asked."""
        try:
            results = await self._service.score(request.prompt, request.responses, request.truncated)
            answer = Scored(request.request_id, tuple(results))
        except UnscorableGold as error:
            answer = Scored(request.request_id, (), "unscorable", str(error))
        except RewardError as error:
            logger.error("%s asked for a score: %s", self._world.describe(source), error)
            answer = Scored(request.request_id, (), "error", str(error))
        self._world.channel.send(source, answer)

    def _tell_controller(self, message: RewardReady | RewardStatus) -> None:
        self._world.channel.send(self._world.controller_rank, message)
