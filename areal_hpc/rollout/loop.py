"""The rollout rank: leases in, shards out, weights on the fly.

    GrantLeases -> episodes (workflow, engine, rewards) -> spooler -> ShardReady
    WeightCall  -> updates -> WeightReturn            EvalRequest -> episodes -> EvalResult

One asyncio loop; each step of its body is a verb. Every lease is a task of its own, so
that the engine always holds as many requests as were granted: there are no batches.
Called by `main` with the rank's world. Writes shards below the run's spool folder.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_hpc.config.schema import Config, Device
from areal_hpc.messages import (
    Drain,
    Drained,
    EngineRestarted,
    EvalRequest,
    EvalResult,
    GrantLeases,
    LeaseFailed,
    Message,
    RolloutReady,
    RolloutStatus,
    Scored,
    ShardReady,
    Stop,
    UnfinishedSaved,
    WeightCall,
)
from areal_hpc.paths import RunPaths
from areal_hpc.rewards.registry import UnscorableGold
from areal_hpc.rewards.remote import RemoteRewards
from areal_hpc.rewards.service import RewardService
from areal_hpc.rollout.engine import EngineDied, PromptTooLong, RolloutEngine
from areal_hpc.rollout.environment import let_engine_go_first, rank_cores
from areal_hpc.rollout.episode import EpisodeEngine, Services
from areal_hpc.rollout.evaluate import evaluate_prompts
from areal_hpc.rollout.spooler import GroupSpooler
from areal_hpc.rollout.supervisor import EngineSupervisor
from areal_hpc.rollout.tokens import PromptEncoder, load_tokenizer
from areal_hpc.rollout.unfinished import read_turns, to_rows
from areal_hpc.rollout.updates import EngineUpdates
from areal_hpc.rollout.workflow import load_workflow
from areal_hpc.spool.shard import ShardWriter
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Lease, Trajectory, unfinished_run_id

if TYPE_CHECKING:
    from areal_hpc.mpi.world import World

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.02
UPDATE_POLL_S = 0.001
"""An update is a chain of calls, each of which waits for the next look at the channel."""
STATUS_INTERVAL_S = 1.0
TRAINING = "lease-"
"""Beginning of the request ids of training answers."""
CUT_DEADLINE_S = 15.0
"""At a stop: longest wait for the engine to give back unfinished answers."""
CUT_SETTLE_S = 0.05
MIN_IDLE_S = 0.05
"""Shorter stretches without requests are not recorded."""


def run(config: Config, world: World, paths: RunPaths, telemetry: Telemetry) -> None:
    """Serve until the controller says Stop; any error ends the rank."""
    if config.run.device is Device.cpu:
        let_engine_go_first()
    asyncio.run(_run(config, world, paths, telemetry))


async def _run(config: Config, world: World, paths: RunPaths, telemetry: Telemetry) -> None:
    log = paths.engine_log(world.role_rank)
    engine = RolloutEngine(config, index=world.role_rank, cores=rank_cores(config, world), log=log)
    updates = EngineUpdates(config, engine, world.role_rank, telemetry)
    supervisor = EngineSupervisor(config.rollout, engine, updates, log)
    try:
        async with _reward_service(config, world, telemetry) as rewards:
            await supervisor.start()
            encoder = PromptEncoder(load_tokenizer(config.model.tokenizer), config.data)
            worker = RolloutWorker(
                world,
                paths,
                Services(config, engine, rewards, encoder),
                updates,
                supervisor,
                GroupSpooler(
                    ShardWriter(
                        paths.rollout_spool(world.role_rank), config.run.name, world.role_rank
                    ),
                    shard_bytes=config.rollout.shard_bytes,
                    latency_s=config.rollout.shard_latency_s,
                ),
                telemetry,
            )
            await worker.serve()
    finally:
        engine.kill()
        updates.close()


def _reward_service(config: Config, world: World, telemetry: Telemetry) -> RewardService | RemoteRewards:
    """A pool of this rank's own, or the way to the reward ranks."""
    if world.reward_ranks:
        return RemoteRewards(world, config.rewards.answer_deadline_s)
    return RewardService(config.rewards, telemetry)


@dataclass(frozen=True)
class Episode:
    """A group under way here, and its view of the engine."""

    lease: Lease
    engine: EpisodeEngine


class RolloutWorker:
    """State of the loop: the episodes under way and what has to be told to whom."""

    def __init__(
        self,
        world: World,
        paths: RunPaths,
        services: Services,
        updates: EngineUpdates,
        supervisor: EngineSupervisor,
        spooler: GroupSpooler,
        telemetry: Telemetry,
    ) -> None:
        self._world = world
        self._paths = paths
        self._services = services
        self._config = services.config
        self._updates = updates
        self._supervisor = supervisor
        self._spooler = spooler
        self._telemetry = telemetry
        self._workflow = load_workflow(
            self._config.rollout.workflow, dict(self._config.rollout.workflow_options)
        )
        self._episodes: dict[asyncio.Task[list[Trajectory]], Episode] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._lost: list[int] = []
        self._counters: Counter[str] = Counter()
        self._drain: Drain | None = None
        self._drained = self._keeping = False
        self._unfinished: tuple[int, ...] = ()
        self._stopped = False
        self._next_status = 0.0
        self._evaluations = 0
        self._idle: tuple[str, float] = ("", 0.0)
        """What the engine, which has nothing to generate, waits for, and since when."""

    async def serve(self) -> None:
        """The rank's loop."""
        self._tell_controller(
            RolloutReady(
                self._world.role_rank,
                self._world.host,
                self._services.engine.capacity,
                self._updates.version,
            )
        )
        while not self._stopped:
            self.receive_messages()
            self.watch_engine()
            self.collect_episodes()
            self.commit_groups()
            self.finish_drain()
            self.note_idleness()
            self.report_status()
            await asyncio.sleep(UPDATE_POLL_S if self._updates.in_progress else IDLE_POLL_S)
        self._end_idleness()
        self._cancel_everything()

    # -- steps ---------------------------------------------------------------------

    def receive_messages(self) -> None:
        for source, message in self._world.channel.poll():
            match message:
                case GrantLeases():
                    for lease in message.leases:
                        self._start_episode(lease)
                case Scored():
                    self._services.rewards.receive(source, message)
                case WeightCall():
                    self._run_errand(self._answer_weight_call(source, message))
                case EvalRequest():
                    self._run_errand(self._answer_eval(message))
                case Drain():
                    self._begin_drain(message)
                case Stop():
                    self._stopped = True
                case _:
                    # ConnectWeights: the trainer lead makes the calls that follow from it.
                    pass

    def watch_engine(self) -> None:
        cause = self._supervisor.watch()
        if cause:
            self._counters["engine_restarts"] += 1
            self._tell_controller(
                EngineRestarted(self._world.role_rank, self._updates.version, cause, tuple(self._lost))
            )
            self._lost = []

    def collect_episodes(self) -> None:
        """Take finished groups to the spooler; an episode's error is the lease's or the rank's."""
        now = time.monotonic()
        for task in [task for task in self._episodes if task.done()]:
            lease = self._episodes.pop(task).lease
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self._counters["groups"] += 1
                self._counters["samples"] += lease.group_size
                self._spooler.add(lease.lease_id, task.result(), now)
            elif isinstance(error, (PromptTooLong, UnscorableGold)):
                self._counters["dropped"] += 1
                reason = f"{type(error).__name__}: {error}"
                self._tell_controller(LeaseFailed(lease.lease_id, lease.group_id, False, reason))
            elif isinstance(error, EngineDied):
                self._counters["lost_leases"] += 1
                self._lost.append(lease.lease_id)
            else:
                raise error
        for errand in [errand for errand in self._errands if errand.done()]:
            self._errands.discard(errand)
            if not errand.cancelled():
                errand.result()

    def commit_groups(self) -> None:
        # With nothing under way no group will join those that wait, and somebody may wait for them.
        shard = self._spooler.commit_due(time.monotonic(), flush=self._drain is not None or not self._episodes)
        if shard is None:
            return
        path = self._paths.relative(shard.info.path)
        self._telemetry.record_span(
            "rollout.spool", shard.began, shard.seconds, path=path, num_bytes=shard.info.num_bytes,
            rows=len(shard.info.rows),
        )  # fmt: skip
        self._tell_controller(ShardReady(path, shard.info.digest, shard.lease_ids, shard.info.rows))

    def finish_drain(self) -> None:
        if self._drain is None or self._drained or self._keeping or self._episodes or not self._spooler.empty:
            return
        self._drained = True
        self._tell_controller(Drained(self._unfinished + tuple(self._lost)))

    def note_idleness(self) -> None:
        """Record each stretch in which the engine had nothing to generate, with what it waited for."""
        gauges, why = self._services.engine.gauges, ""
        if not self._supervisor.ready.is_set():
            why = "engine"
        elif not (gauges.num_running or gauges.num_waiting):
            if self._services.rewards.num_scoring:
                why = "reward"
            elif not (self._episodes or self._evaluations):
                why = "lease"
        if why != self._idle[0]:
            self._end_idleness(why)

    def _end_idleness(self, why: str = "") -> None:
        (before, since), now = self._idle, time.time()
        self._idle = (why, now)
        if before and now - since >= MIN_IDLE_S:
            self._telemetry.record_span("rollout.idle", since, now - since, waiting=before)

    def report_status(self) -> None:
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + STATUS_INTERVAL_S
        gauges = self._services.engine.gauges
        counters = {name: float(value) for name, value in self._counters.items()}
        counters |= {
            "episodes": float(len(self._episodes)),
            "prompt_tokens": float(gauges.prompt_tokens),
            "cached_prompt_tokens": float(gauges.cached_prompt_tokens),
        }
        rewards = self._services.rewards.stats()
        counters |= {f"reward_{name}": value for name, value in rewards.items()}
        self._telemetry.value("rollout.generated_tokens", gauges.generated_tokens)
        if not self._world.reward_ranks:
            self._telemetry.value("rollout.reward_s", rewards["seconds"], checks=rewards["checks"])
        self._telemetry.value("rollout.running", gauges.num_running, waiting=gauges.num_waiting)
        self._tell_controller(
            RolloutStatus(
                self._world.role_rank,
                self._updates.version,
                gauges.num_running,
                gauges.num_waiting,
                gauges.generated_tokens,
                counters,
            )
        )

    # -- work ----------------------------------------------------------------------

    def _start_episode(self, lease: Lease) -> None:
        if self._drain is not None:
            reason = "the rollout is draining"
            self._tell_controller(LeaseFailed(lease.lease_id, lease.group_id, True, reason))
            return
        episode = Episode(lease, self._episode_engine(lease))
        self._episodes[asyncio.create_task(self._run_episode(episode))] = episode

    def _episode_engine(self, lease: Lease) -> EpisodeEngine:
        seed = lease.sampling.seed if lease.sampling.seed is not None else self._config.run.seed
        return EpisodeEngine(
            self._services,
            group_id=lease.group_id,
            group_size=lease.group_size,
            sampling=lease.sampling,
            # A deterministic run answers again what it would have answered before.
            seed_parts=(seed, "train", lease.group_id, 1 if self._config.run.deterministic else lease.attempt),
            request_prefix=f"{TRAINING}{lease.lease_id}",
        )

    async def _run_episode(self, episode: Episode) -> list[Trajectory]:
        lease, engine = episode.lease, episode.engine
        if lease.begun is not None:
            engine.begun = await asyncio.to_thread(read_turns, self._paths, self._config.run.name, lease)
        await self._supervisor.ready.wait()
        with self._telemetry.span("rollout.episode", group=lease.group_id, attempt=lease.attempt) as span:
            trajectories = await self._workflow.arun_episode(engine, lease.prompt)
            if len(trajectories) != lease.group_size:
                raise RuntimeError(
                    f"workflow {self._config.rollout.workflow} made {len(trajectories)} trajectories for a "
                    f"group of {lease.group_size}"
                )
            span["tokens"] = sum(sample.num_loss_tokens for sample in trajectories)
            span["versions"] = max(
                int(sample.versions.max()) - sample.min_version for sample in trajectories
            )
        return trajectories

    async def _answer_weight_call(self, source: int, call: WeightCall) -> None:
        self._world.channel.send(source, await self._updates.handle(call))

    async def _answer_eval(self, request: EvalRequest) -> None:
        self._evaluations += 1
        with self._telemetry.span("rollout.eval", version=request.version, prompts=len(request.prompts)):
            samples = await evaluate_prompts(
                self._services,
                self._workflow,
                request.prompts,
                request.num_samples,
                request.sampling,
                self._supervisor.ready,
            )
        self._evaluations -= 1
        self._tell_controller(EvalResult(request.eval_id, self._world.role_rank, tuple(samples)))

    def _begin_drain(self, drain: Drain) -> None:
        self._drain = drain
        logger.info("draining (%s): %d episodes under way", drain.reason, len(self._episodes))
        if drain.abandon and drain.keep:
            self._keeping = True
            self._run_errand(self._keep_unfinished())
        elif drain.abandon:
            self._abandon_episodes()

    async def _keep_unfinished(self) -> None:
        """Save what the unfinished answers have so far, and abandon them."""
        try:
            async with asyncio.timeout(CUT_DEADLINE_S):
                await self._services.engine.cut_short(TRAINING)
                await asyncio.sleep(CUT_SETTLE_S)  # the episodes take note of it
        except (TimeoutError, EngineDied) as error:
            logger.warning("unfinished answers of the engine are lost: %s", error or "it does not answer")
        running = [episode for task, episode in self._episodes.items() if not task.done()]
        rows = [row for episode in running for row in to_rows(episode.engine.turns, episode.lease)]
        self._abandon_episodes()
        if rows:
            await self._save_unfinished(rows)
        self._keeping = False

    async def _save_unfinished(self, rows: list[Trajectory]) -> None:
        rank = self._world.role_rank
        writer = ShardWriter(self._paths.unfinished(rank), unfinished_run_id(self._config.run.name), rank)
        try:
            info = await asyncio.to_thread(writer.commit, rows)
        except OSError as error:
            # They can be answered again; what is finished must still be committed.
            logger.warning("unfinished answers could not be saved: %s", error)
            return
        self._tell_controller(UnfinishedSaved(self._paths.relative(info.path), info.digest, info.rows))

    def _abandon_episodes(self) -> None:
        running = {task: episode.lease for task, episode in self._episodes.items() if not task.done()}
        self._unfinished = tuple(lease.lease_id for lease in running.values())
        for task in running:
            task.cancel()

    def _run_errand(self, call: Coroutine[Any, Any, None]) -> None:
        self._errands.add(asyncio.create_task(call))

    def _tell_controller(self, message: Message) -> None:
        self._world.channel.send(self._world.controller_rank, message)

    def _cancel_everything(self) -> None:
        for task in (*self._episodes, *self._errands):
            task.cancel()
