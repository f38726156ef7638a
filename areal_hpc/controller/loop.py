"""The controller: one loop that receives reports, grants leases and forms batches.

    prompts -> leases ---LEASE---> rollouts ---SHARD_READY---> batcher
       ^          ^                                              |
       +-- staleness budget <--- VERSION_LIVE <--- trainer <--TRAIN_BATCH

It owns every decision and the journal of them, computes nothing and never blocks in MPI.
A batch is not formed while that would leave a group under way that could then no longer
be trained within the bound: a straggler is waited for rather than thrown away.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter, defaultdict
from typing import Any

import msgspec

from areal_hpc.config.schema import Config
from areal_hpc.controller.batcher import Batcher, ReadyGroup, make_manifest
from areal_hpc.controller.evaluation import Evaluation
from areal_hpc.controller.leases import LeaseBook, UnderWay
from areal_hpc.controller.progress import Progress, RankSign
from areal_hpc.controller.prompts import PromptCursor
from areal_hpc.controller.selection import keep_group
from areal_hpc.controller.shutdown import drain
from areal_hpc.controller.staleness import StalenessBudget
from areal_hpc.controller.startup import connect_weights, open_ledger, staleness_bound, wait_for_ranks
from areal_hpc.data.datasets import load_prompt_sets
from areal_hpc.messages import (
    CheckpointSaved,
    Drained,
    EngineRestarted,
    EvalResult,
    GrantLeases,
    LeaseFailed,
    Message,
    Publish,
    PublishFailed,
    RolloutStatus,
    SaveCheckpoint,
    ShardReady,
    StepDone,
    TrainBatch,
    VersionLive,
)
from areal_hpc.mpi.world import World, role_of
from areal_hpc.paths import RunPaths
from areal_hpc.stop import FLAG, StopFlag
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Lease, SamplingSpec, ShardRow

log = logging.getLogger(__name__)

IDLE_S = 0.002
QUEUE_FACTOR = 1.5
"""Sequences granted to an engine over those it runs at once, so that it never waits for a grant."""


def run(config: Config, world: World, paths: RunPaths, telemetry: Telemetry, stop: StopFlag = FLAG) -> None:
    """Control the run to its end, or drain it when a stop is requested."""
    controller = Controller(config, world, paths, telemetry)
    while not controller.finished and not stop:
        busy = controller.receive_reports()
        controller.expire_leases()
        controller.publish()
        controller.save_checkpoint()
        controller.evaluate()
        controller.form_batch()
        controller.grant_leases()
        controller.watch()
        if not busy:
            time.sleep(IDLE_S)
    drain(controller, stop)


class Controller:
    """State of a run and the steps of its loop."""

    def __init__(self, config: Config, world: World, paths: RunPaths, telemetry: Telemetry) -> None:
        self.config, self.world, self.paths, self.telemetry = config, world, paths, telemetry
        self.channel = world.channel
        self.prompts = load_prompt_sets(config.data)
        ranks = {
            rank: RankSign(role_of(rank, len(world.trainer_ranks))[0], host)
            for rank, host in enumerate(world.hosts)
        }
        self.progress = Progress(paths, attempt=1, ranks=ranks)
        ready = wait_for_ranks(config, world, self.progress, self.prompts)
        self.train_step = self.version = self.live_version = ready.train_step
        self._room = {
            rank: max(int(QUEUE_FACTOR * capacity) // config.rollout.group_size, 1)
            for rank, capacity in ready.capacities.items()
        }
        self.eta = staleness_bound(config)
        self.budget = StalenessBudget(config.trainer.batch_size, self.eta)
        self.batcher = Batcher()
        self.leases = LeaseBook(
            group_size=config.rollout.group_size,
            sampling=_sampling(config),
            deadline_s=config.rollout.lease_deadline_s,
            max_attempts=config.rollout.max_attempts,
        )
        connect_weights(config, world, self.progress, self.version)
        self.ledger, past = open_ledger(paths.ledger, config, self.prompts, self.train_step)
        self.progress.set_attempt(past.attempt)
        self.cursor = PromptCursor(
            self.prompts.train, seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.data.epochs,
            position=past.position,
        )  # fmt: skip
        self.counters: Counter[str] = Counter()
        self.training: list[ReadyGroup] = []
        """Groups of the batch that is being trained or whose version is not live yet."""
        self.step_sent = self.publishing = self.saving = False
        self.pending_publish: int | None = None
        self.publish_failures = 0
        self.checkpoint_due: int | None = None
        self.saved_step = self.train_step
        self.evaluation: Evaluation | None = None
        self._eval_asked: dict[int, set[int]] = defaultdict(set)
        self._eval_id = 0
        self._eval_began = 0.0
        self._evaluated: int | None = None
        self.eval_due = bool(self.prompts.heldout) and self.train_step == 0
        self._idle_since = time.monotonic()
        self._wait_s = 0.0
        self._last_progress = time.monotonic()
        self._refused = 0
        self.holding = False
        self._restore(past)

    def _restore(self, past) -> None:
        if past.attempt > 1:
            self.progress.event(
                f"attempt {past.attempt}: going on from step {self.train_step} with {len(past.ready)} ready groups "
                f"({past.num_returned} consumed after the checkpoint) and {len(past.in_flight)} to answer again"
            )
        for group in past.ready.values():
            self.batcher.add(group)
            self.budget.restore(group.epoch, len(group.rows))
        for group_id in past.in_flight:
            entry = self.cursor.at(group_id)
            self.leases.admit(group_id, entry.epoch, entry.prompt, self.live_version)
            self.budget.restore(entry.epoch, self.config.rollout.group_size)
        for epoch in {*self.batcher.epochs, *(self.cursor.at(group_id).epoch for group_id in past.in_flight)}:
            if self.cursor.epoch_closed(epoch):
                self.budget.close_epoch(epoch)

    # ---- reports -----------------------------------------------------------------

    def receive_reports(self) -> bool:
        """Handle what has arrived; whether there was anything."""
        envelopes = self.channel.poll()
        for source, message in envelopes:
            if not isinstance(message, RolloutStatus):
                self.progress.heard(source)
                self._last_progress = time.monotonic()
            self.handle(source, message)
        self.ledger.sync()
        return bool(envelopes)

    def handle(self, source: int, message: Message) -> None:
        match message:
            case RolloutStatus():
                self.progress.rollout_status(source, message)
            case ShardReady():
                self._take_shard(message)
            case LeaseFailed():
                self._drop(self.leases.fail(message.lease_id, retry=message.retry), message.reason)
            case EngineRestarted():
                self._engine_restarted(source, message)
            case EvalResult():
                self._take_evaluation(source, message)
            case StepDone():
                self._step_done(message)
            case VersionLive():
                self._version_live(message)
            case PublishFailed():
                self._publish_failed(message)
            case CheckpointSaved():
                self._checkpoint_saved(message)
            case Drained():
                pass
            case _:
                raise RuntimeError(f"unexpected {type(message).__name__} from {self.world.describe(source)}")

    def _take_shard(self, shard: ShardReady) -> None:
        groups: dict[int, list[ShardRow]] = defaultdict(list)
        for row in shard.rows:
            groups[row.group_id].append(row)
        accepted: list[ReadyGroup] = []
        for group_id, rows in groups.items():
            lease = self.leases.complete(group_id)
            if lease is not None:
                accepted.append(ReadyGroup(group_id, lease.epoch, shard.path, tuple(rows)))
        if not accepted:
            return
        self.ledger.add(
            "committed",
            path=shard.path,
            digest=shard.digest,
            groups=[
                {"group": group.group_id, "epoch": group.epoch, "rows": msgspec.to_builtins(group.rows)}
                for group in accepted
            ],
        )
        per_batch = self.config.trainer.batch_size // self.config.rollout.group_size
        for group in accepted:
            self.counters["trajectories"] += len(group.rows)
            if keep_group(
                group.rewards, self.config.algorithm, num_refused=self._refused, groups_per_batch=per_batch
            ):
                self.batcher.add(group)
            else:
                self._refused += 1
                self._discard([group], "equal rewards")

    def _discard(self, groups: list[ReadyGroup], reason: str) -> None:
        if not groups:
            return
        self.ledger.add("discarded", groups=[group.group_id for group in groups], reason=reason)
        for group in groups:
            self.budget.release(group.epoch, len(group.rows))
        self.counters[f"discarded ({reason})"] += len(groups)

    def _drop(self, group: UnderWay | None, reason: str) -> None:
        if group is None:
            self.counters["granted_again"] += 1
            return
        self.ledger.add("dropped", groups=[group.group_id], reason=reason)
        self.budget.release(group.epoch, self.config.rollout.group_size)
        self.counters["dropped"] += 1
        log.warning("prompt %d dropped: %s", group.prompt.prompt_id, reason)
        if self.counters["dropped"] <= 5:
            self.progress.event(f"prompt {group.prompt.prompt_id} left out: {reason}")

    def _engine_restarted(self, source: int, message: EngineRestarted) -> None:
        self.counters["engine_restarts"] += 1
        self.progress.event(
            f"the engine of {self.world.describe(source)} was restarted with version {message.version}: "
            f"{message.cause}; {len(message.lost_leases)} leases are granted again"
        )
        for lease_id in message.lost_leases:
            self._drop(self.leases.fail(lease_id, retry=True), "the engine failed with it too often")

    # ---- steps -------------------------------------------------------------------

    def expire_leases(self) -> None:
        for group in self.leases.expire(time.monotonic()):
            self._drop(group, f"not answered within {self.config.rollout.lease_deadline_s:.0f} s")

    def grant_leases(self) -> None:
        """Keep every engine full, as far as the staleness bound and the rest of the run need it."""
        now, size = time.monotonic(), self.config.rollout.group_size
        free = [
            (self.leases.load(rank) / room, rank)
            for rank, room in self._room.items()
            if self.leases.load(rank) < room
        ]
        heapq.heapify(free)
        grants: dict[int, list[Lease]] = defaultdict(list)
        while free and (self.leases.waiting or self._admit_next(size)):
            _, rank = heapq.heappop(free)
            lease = self.leases.grant_next(rank, now, self.live_version)
            if lease is None:
                continue
            grants[rank].append(lease)
            load = self.leases.load(rank)
            if load < self._room[rank]:
                heapq.heappush(free, (load / self._room[rank], rank))
        if grants:
            self.ledger.sync()
        for rank, leases in grants.items():
            self.channel.send(rank, GrantLeases(tuple(leases)))

    def _admit_next(self, size: int) -> bool:
        """Admit the next prompt if there is one, the bound allows it and the run still needs it."""
        if self.cursor.exhausted or self.budget.capacity < size:
            return False
        steps_left = self.config.run.total_steps - self.train_step - self.step_sent
        unconsumed = self.budget.outstanding - sum(len(group.rows) for group in self.training)
        if unconsumed + size > steps_left * self.config.trainer.batch_size:
            return False
        entry = self.cursor.peek()
        assert entry is not None
        self.budget.admit(entry.epoch, size)
        self.leases.admit(entry.ordinal, entry.epoch, entry.prompt, self.live_version)
        self.ledger.add("admitted", group=entry.ordinal, epoch=entry.epoch, version=self.live_version)
        self.cursor.advance()
        if entry.last_of_epoch:
            self.budget.close_epoch(entry.epoch)
        return True

    def form_batch(self) -> None:
        """Send the next batch when the trainer is free and enough groups are ready."""
        if self.step_sent or self.publishing or self.pending_publish is not None or self.checkpoint_due is not None:
            return
        if self.training or self.training_over:
            return
        self._discard(self.batcher.discard_older(self.version - self.eta), "too old")
        groups = self._next_groups()
        if not groups:
            return
        manifest = make_manifest(
            groups, train_step=self.train_step + 1, version=self.version, dp=self.config.trainer.dp
        )
        self.ledger.add(
            "consumed", train_step=manifest.train_step, version=self.version,
            groups=[group.group_id for group in groups],
        )  # fmt: skip
        self.ledger.sync()
        self._send_trainers(TrainBatch(manifest))
        self.training, self.step_sent, self._refused = groups, True, 0
        self._wait_s = time.monotonic() - self._idle_since
        self.telemetry.record_span("controller.batch", time.time(), 0.0, train_step=manifest.train_step)

    def _next_groups(self) -> list[ReadyGroup]:
        batch_size = self.config.trainer.batch_size
        self.holding = False
        for epoch in self.batcher.epochs:
            ready, under_way = self.batcher.num_trajectories(epoch), self.leases.under_way(epoch)
            closed = self.cursor.epoch_closed(epoch) and not under_way
            if ready < batch_size and not closed:
                return []
            oldest = self.leases.oldest_version
            if oldest is not None and self.version + 1 - oldest > self.eta:
                self.holding = True
                return []
            return self.batcher.take(epoch, batch_size)
        return []

    def publish(self) -> None:
        """Send the newest weights on, but not while an evaluation needs the ones that serve."""
        if self.pending_publish is None or self.publishing or self.evaluation is not None:
            return
        self._send_trainers(Publish(self.pending_publish))
        self.pending_publish, self.publishing = None, True

    def save_checkpoint(self) -> None:
        if self.checkpoint_due is None or self.pending_publish is not None or self.publishing:
            return
        self._send_trainers(
            SaveCheckpoint(self.checkpoint_due, self.version, self.training_over and self.config.checkpoint.export_hf)
        )
        self.checkpoint_due, self.saving = None, True

    def evaluate(self) -> None:
        """Begin an evaluation that is due once its version serves."""
        if not self.eval_due or self.evaluation is not None or self.live_version != self.version:
            return
        self.eval_due = False
        self._eval_began = time.monotonic()
        evaluation = Evaluation(
            self.config, self.prompts.heldout, train_step=self.train_step, version=self.live_version,
            first_id=self._eval_id,
        )  # fmt: skip
        self._eval_id += len(evaluation.requests)
        self.evaluation = evaluation
        ranks = self.world.rollout_ranks
        for number, request in enumerate(evaluation.requests):
            rank = ranks[number % len(ranks)]
            self._eval_asked[rank].add(request.eval_id)
            self.channel.send(rank, request)

    def watch(self) -> None:
        """Write the status; end a run in which nothing happens any more."""
        self.progress.heard(self.world.world_rank)
        self.progress.write_status(self.status)
        limit = self.config.run.stall_deadline_s
        if time.monotonic() - self._last_progress > limit:
            raise TimeoutError(f"nothing happened for {limit:.0f} s; the run waits for {self.waiting_for()}")

    # ---- what follows from reports -----------------------------------------------

    def _step_done(self, message: StepDone) -> None:
        self.step_sent = False
        self._idle_since = time.monotonic()
        rows = [row for group in self.training for row in group.rows]
        stale = [self.version - row.min_version for row in rows if row.num_loss_tokens] or [0]
        self.train_step, before = message.train_step, self.version
        self.version = self.pending_publish = message.version
        every = self.config.checkpoint.every
        if self.training_over or (every and self.train_step % every == 0):
            self.checkpoint_due = self.train_step
        self.progress.step(
            {
                "train_step": self.train_step,
                "version": before,
                "epoch": self.training[0].epoch,
                "reward_mean": sum(row.reward for row in rows) / len(rows),
                "accuracy": sum(row.reward > 0 for row in rows) / len(rows),
                "num_trajectories": len(rows),
                "staleness_mean": sum(stale) / len(stale),
                "staleness_max": max(stale),
                "wait_s": self._wait_s,
                "ready_groups": len(self.batcher),
                "groups_under_way": len(self.leases),
                "trajectories_outstanding": self.budget.outstanding,
                "leases_expired": self.leases.num_expired,
                "duplicates": self.leases.num_duplicates,
                **self.counters,
            },
            message.metrics,
        )

    def _version_live(self, message: VersionLive) -> None:
        self.publishing, self.publish_failures = False, 0
        self.live_version = message.version
        self.ledger.add("live", version=message.version)
        for group in self.training:
            self.budget.release(group.epoch, len(group.rows))
        self.training = []
        self.telemetry.value("controller.publish_s", message.timings.get("total_s", 0.0), **message.timings)
        every = self.config.eval.every
        due = self.training_over or (every and self.train_step % every == 0)
        self.eval_due = bool(self.prompts.heldout) and bool(due)

    def _publish_failed(self, message: PublishFailed) -> None:
        self.publishing = False
        self.publish_failures += 1
        self.counters["publish_failures"] += 1
        self.progress.event(f"version {message.version} was not published, version {self.live_version} goes on "
                            f"serving: {message.reason}")  # fmt: skip
        if self.publish_failures > self.config.weights.max_retries:
            raise RuntimeError(
                f"version {message.version} could not be published in {self.publish_failures} attempts: "
                f"{message.reason}"
            )
        self.pending_publish = message.version

    def _checkpoint_saved(self, message: CheckpointSaved) -> None:
        self.saving = False
        self.saved_step = message.train_step
        self.ledger.add("checkpoint", train_step=message.train_step, path=message.path)
        log.info("checkpoint %s saved in %.1f s", message.path, message.seconds)

    def _take_evaluation(self, source: int, message: EvalResult) -> None:
        self._eval_asked[source].discard(message.eval_id)
        if self.evaluation is None or not self.evaluation.receive(message) or not self.evaluation.finished:
            return
        evaluation, self.evaluation = self.evaluation, None
        evaluation.write(self.paths.evals)
        values = {
            "train_step": evaluation.train_step,
            "version": evaluation.version,
            "seconds": time.monotonic() - self._eval_began,
            **evaluation.summary(),
        }
        self.ledger.add("eval", train_step=evaluation.train_step, accuracy=values["accuracy"])
        self.progress.evaluation(values)

    # ---- state -------------------------------------------------------------------

    @property
    def training_over(self) -> bool:
        """No further step: the last one is done, or the data is exhausted."""
        if self.train_step >= self.config.run.total_steps:
            return True
        return self.cursor.exhausted and not (self.leases or self.batcher or self.step_sent)

    @property
    def finished(self) -> bool:
        """Training is over, its last version was served, evaluated and saved."""
        if not self.training_over or self.step_sent or self.publishing or self.pending_publish is not None:
            return False
        if self.eval_due or self.evaluation is not None or self.checkpoint_due is not None or self.saving:
            return False
        if self.saved_step < self.train_step:
            self.checkpoint_due = self.train_step
            return False
        return True

    def waiting_for(self) -> str:
        if self.step_sent:
            return f"the trainer to finish step {self.train_step + 1}"
        if self.publishing:
            return f"the engines to take version {self.version}"
        if self.evaluation is not None:
            return f"rollouts to answer the evaluation of version {self.evaluation.version}"
        if self.saving:
            return f"the trainer to save step {self.train_step}"
        if self.holding:
            return f"groups that were begun at version {self.leases.oldest_version} (the bound is {self.eta})"
        return (
            f"rollouts: {len(self.batcher)} groups are ready, {len(self.leases)} under way "
            f"({self.leases.waiting} not granted)"
        )

    def status(self) -> dict[str, Any]:
        return {
            "state": "running",
            "name": self.config.run.name,
            "train_step": self.train_step,
            "total_steps": self.config.run.total_steps,
            "version": self.version,
            "live_version": self.live_version,
            "ready_groups": len(self.batcher),
            "groups_under_way": len(self.leases),
            "trajectories_outstanding": self.budget.outstanding,
            "capacity": self.budget.capacity,
            "epoch": self.cursor.position // len(self.prompts.train),
            "waiting_for": self.waiting_for(),
            "counters": dict(self.counters),
        }

    def _send_trainers(self, message: Message) -> None:
        for rank in self.world.trainer_ranks:
            self.channel.send(rank, message)


def _sampling(config: Config) -> SamplingSpec:
    rollout = config.rollout
    return SamplingSpec(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
