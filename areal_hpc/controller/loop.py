"""The controller: one loop that receives reports, grants leases and forms batches.

    prompts -> admission ---LEASE---> rollouts ---SHARD_READY---> batcher
                   ^                                                 |
                   +-- places <--- VERSION_LIVE <--- trainers <---TRAIN_BATCH

It owns every decision and the journal of them, computes nothing and never blocks in MPI.
Called by `main` with the controller's world; writes the ledger, the metrics, the status,
and the answers of evaluations. The run's lock is `main`'s, taken before any rank writes.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from areal_hpc.config.schema import Config
from areal_hpc.controller.admission import Admission
from areal_hpc.controller.batcher import choose_epoch
from areal_hpc.controller.boards import open_boards
from areal_hpc.controller.evaluation import Evaluator
from areal_hpc.controller.groups import Groups
from areal_hpc.controller.leases import LeaseBook
from areal_hpc.controller.ledger import last_run
from areal_hpc.controller.progress import Progress, RankSign, describe_batch
from areal_hpc.controller.prompts import PromptCursor
from areal_hpc.controller.recovery import TOO_OLD, Recovered
from areal_hpc.controller.shutdown import drain, let_everybody_go
from areal_hpc.controller.staleness import StalenessBudget
from areal_hpc.controller.startup import (
    StoppedEarly,
    connect_weights,
    open_ledger,
    staleness_bound,
    wait_for_ranks,
)
from areal_hpc.controller.trainers import Trainers
from areal_hpc.data.datasets import load_prompt_sets
from areal_hpc.data.identity import check_prompts
from areal_hpc.messages import (
    BatchRefused,
    CheckpointSaved,
    Drained,
    EngineRestarted,
    EvalResult,
    GrantLeases,
    LeaseFailed,
    Message,
    PublishFailed,
    RewardStatus,
    RolloutStatus,
    ShardReady,
    StepDone,
    UnfinishedSaved,
    VersionLive,
)
from areal_hpc.mpi.world import World, role_of
from areal_hpc.paths import RunPaths
from areal_hpc.stop import FLAG, StopFlag
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import SamplingSpec

log = logging.getLogger(__name__)

IDLE_S = 0.002
QUEUE_FACTOR = 1.5
"""Sequences granted to an engine over those it runs at once, so that it never waits for a grant."""


def run(config: Config, world: World, paths: RunPaths, telemetry: Telemetry, stop: StopFlag = FLAG) -> None:
    """Control the run to its end, or drain it when a stop is requested."""
    progress = Progress(paths, ranks=_signs(world), boards=open_boards(config, paths))
    try:
        controller = Controller(config, world, paths, telemetry, progress, stop)
    except StoppedEarly:
        final = {"state": "stopped", "reason": stop.reason, "requeue": stop.requeue}
        let_everybody_go(world, progress, final)
        return
    # What an earlier stop cut short is under way before a batch is formed: it may belong in it.
    controller.grant_leases()
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

    def __init__(
        self,
        config: Config,
        world: World,
        paths: RunPaths,
        telemetry: Telemetry,
        progress: Progress,
        stop: StopFlag,
    ) -> None:
        """Returns when all ranks are ready, connected, and the past is recovered."""
        self.config, self.world, self.paths = config, world, paths
        self.telemetry, self.progress = telemetry, progress
        self.eta = staleness_bound(config)
        self.prompts = load_prompt_sets(config.data)
        check_prompts(config, last_run(paths.ledger), self.prompts)
        ready = wait_for_ranks(config, world, progress, stop)
        connect_weights(config, world, progress, ready.train_step)
        self.ledger, past = open_ledger(config, paths, self.prompts, ready.train_step, progress)
        self.trainers = Trainers(config, world, ready.train_step)
        self.evaluator = Evaluator(config, world, self.prompts.heldout, past.evaluated)
        self.admission = self._make_admission(ready.capacities, past)
        self.leases, self.budget = self.admission.leases, self.admission.budget
        self.groups = Groups(config, paths, self.admission, self.ledger, progress, past.ready.values())
        self.batcher, self.counters = self.groups.batcher, self.groups.counters
        self._first_step = ready.train_step
        self._exported = not config.checkpoint.export_hf or paths.export(ready.train_step).exists()
        self._held_for: int | None = None
        self._wait_s = 0.0
        self._idle_since = self._last_progress = time.monotonic()

    def _make_admission(self, capacities: dict[int, int], past: Recovered) -> Admission:
        config, group_size = self.config, self.config.rollout.group_size
        leases = LeaseBook(
            room={
                rank: max(int(QUEUE_FACTOR * capacity) // group_size, 1) for rank, capacity in capacities.items()
            },
            group_size=group_size,
            sampling=_sampling(config),
            deadline_s=config.rollout.lease_deadline_s,
            max_attempts=config.rollout.max_attempts,
            max_staleness=self.eta,
        )
        cursor = PromptCursor(
            self.prompts.train,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            epochs=config.data.epochs,
            position=past.position,
            first=past.first_group,
        )
        budget = StalenessBudget(config.trainer.batch_size, self.eta)
        return Admission(
            cursor, budget, leases, self.ledger, group_size, ready=past.ready.values(), ask_again=past.in_flight,
            begun=past.unfinished,
        )  # fmt: skip

    # ---- reports -----------------------------------------------------------------

    def receive_reports(self) -> bool:
        """Handle what has arrived; whether there was anything."""
        envelopes = self.world.channel.poll()
        for source, message in envelopes:
            self.progress.heard(source)
            if not isinstance(message, (RolloutStatus, RewardStatus)):
                self._last_progress = time.monotonic()
            self.handle(source, message)
        self.ledger.sync()
        return bool(envelopes)

    def handle(self, source: int, message: Message) -> None:
        match message:
            case RolloutStatus():
                self.progress.rollout_status(source, message)
            case RewardStatus():
                self.progress.heard(source, **message.counters)
            case ShardReady():
                self.groups.take_shard(message, self.trainers.train_step)
            case UnfinishedSaved():
                self.groups.note_unfinished(message)
            case LeaseFailed():
                ended = [self.leases.fail(message.lease_id, retry=message.retry)]
                self.groups.end_leases(ended, message.reason, by_chance=message.retry)
            case EngineRestarted():
                self._engine_restarted(source, message)
            case EvalResult():
                self._take_evaluation(message)
            case StepDone():
                self._step_done(message)
            case BatchRefused():
                self.groups.take_back(self.trainers.batch_refused(message), message, self.trainers.live_version)
            case VersionLive():
                self._version_live(message)
            case PublishFailed():
                self._publish_failed(message)
            case CheckpointSaved():
                self.trainers.checkpoint_saved(message)
                self.ledger.add("checkpoint", train_step=message.train_step, path=message.path)
                log.info("checkpoint %s saved in %.1f s", message.path, message.seconds)
            case Drained():
                pass
            case _:
                raise RuntimeError(f"unexpected {type(message).__name__} from {self.world.describe(source)}")

    def _engine_restarted(self, source: int, message: EngineRestarted) -> None:
        self.counters["engine_restarts"] += 1
        self.progress.event(
            f"the engine of {self.world.describe(source)} was restarted with version {message.version}: "
            f"{message.cause}; {len(message.lost_leases)} leases are granted again"
        )
        ended = [self.leases.fail(lease_id, retry=True) for lease_id in message.lost_leases]
        self.groups.end_leases(ended, "the engine failed with it too often")

    def _take_evaluation(self, message: EvalResult) -> None:
        values = self.evaluator.receive(message, self.paths.evals)
        if values is not None:
            self.ledger.add("eval", train_step=values["train_step"], accuracy=values["accuracy"])
            self.progress.evaluation(values)

    def _step_done(self, message: StepDone) -> None:
        batch, version = self.trainers.batch, self.trainers.version
        self.trainers.step_done(message)
        self._exported = not self.config.checkpoint.export_hf
        self._idle_since = time.monotonic()
        values = {
            "train_step": message.train_step,
            "version": version,
            **describe_batch(batch, version),
            "wait_s": self._wait_s,
            "ready_groups": len(self.batcher),
            "groups_under_way": len(self.leases),
            "trajectories_outstanding": self.budget.outstanding,
            **self.counted(),
        }
        self.progress.step(values, message.metrics)

    def _version_live(self, message: VersionLive) -> None:
        self.groups.give_back(self.trainers.version_live(message))
        self._idle_since = time.monotonic()
        self.ledger.add("live", version=message.version)
        self.telemetry.value("controller.publish_s", message.timings.get("total_s", 0.0), **message.timings)

    def _publish_failed(self, message: PublishFailed) -> None:
        self.counters["publish_failures"] += 1
        self.progress.event(
            f"version {message.version} was not published, version {self.trainers.live_version} goes on "
            f"serving: {message.reason}"
        )
        self.trainers.publish_failed(message)

    # ---- steps -------------------------------------------------------------------

    def expire_leases(self) -> None:
        limit = self.config.rollout.lease_deadline_s
        reason = f"not answered within {limit:g} s (rollout.lease_deadline_s), {self.config.rollout.max_attempts} times"
        self.groups.end_leases(self.leases.expire(time.monotonic()), reason)

    def publish(self) -> None:
        """Send the newest weights on, but not while an evaluation needs those that serve."""
        if self.evaluator.running is None:
            self.trainers.publish()

    def save_checkpoint(self) -> None:
        """Save when a step ordered it; after the last step also as a Hugging Face folder."""
        trainers, over = self.trainers, self.training_over
        if over and not trainers.busy and trainers.train_step > 0:
            trainers.checkpoint_due |= trainers.saved_step < trainers.train_step or not self._exported
        if trainers.save(export_hf=over and not self._exported):
            self._exported |= over

    def evaluate(self) -> None:
        """Begin an evaluation that is due, once the version to evaluate serves."""
        step, live = self.trainers.train_step, self.trainers.live_version
        if live == self.trainers.version and self.evaluator.due(step, last=self.training_over):
            self.evaluator.begin(step, live)

    def form_batch(self) -> None:
        """Send the next batch when the trainers are free and enough groups are ready."""
        trainers = self.trainers
        if not trainers.free or trainers.train_step >= self.config.run.total_steps:
            return
        self.groups.discard(self.batcher.discard_older(trainers.version - self.eta), TOO_OLD, trainers.train_step)
        size, group_size = self.config.trainer.batch_size, self.config.rollout.group_size
        if self._backlog_missing(size):
            return
        choice = choose_epoch(
            self.batcher,
            ((epoch, version, groups * group_size) for epoch, version, groups in self.leases.classes()),
            is_complete=self._is_complete,
            version=trainers.version,
            eta=self.eta,
            batch_size=size,
        )
        self._held_for = choice.held_for
        if choice.epoch is None:
            return
        groups = self.batcher.take(choice.epoch, size)
        ids = [group.group_id for group in groups]
        self.ledger.add("consumed", train_step=trainers.train_step + 1, version=trainers.version, groups=ids)
        self.ledger.sync()
        trainers.train(groups)
        self.groups.num_refused = 0
        self._wait_s = time.monotonic() - self._idle_since

    def _backlog_missing(self, batch_size: int) -> bool:
        """Whether algorithm.backlog asks for more ready batches, and more can come."""
        wanted = self.config.algorithm.backlog * batch_size
        ready = sum(map(self.batcher.num_trajectories, self.batcher.epochs))
        return ready < wanted and bool(self.leases or self.admission.may_start(self._useful))

    def _is_complete(self, epoch: int) -> bool:
        """Whether no further trajectory of the epoch will come before the next step."""
        if self.leases.under_way(epoch):
            return False
        # The second case is a resumed run whose ready groups fill all places.
        return self.admission.epoch_over(epoch) or not (self.leases or self.admission.may_start(self._useful))

    @property
    def _useful(self) -> int:
        """Outstanding trajectories that the rest of the run can use."""
        trainers = self.trainers
        steps_left = self.config.run.total_steps - trainers.train_step - trainers.step_sent
        return steps_left * self.config.trainer.batch_size + trainers.num_in_batch

    def grant_leases(self) -> None:
        """Keep every engine full, as far as the staleness bound and the rest of the run need it."""
        trainers = self.trainers
        train_version = trainers.version + trainers.step_sent
        grants = self.admission.grant(time.monotonic(), trainers.live_version, self._useful, train_version)
        if grants:
            self.ledger.sync()
        for rank, leases in grants.items():
            self.world.channel.send(rank, GrantLeases(tuple(leases)))

    def watch(self) -> None:
        """Write the status; end a run in which nothing happens any more."""
        self.progress.heard(self.world.world_rank)
        self.progress.write_status(self.status)
        limit = self.config.run.stall_deadline_s
        if time.monotonic() - self._last_progress > limit:
            raise TimeoutError(
                f"nothing happened for {limit:g} s (run.stall_deadline_s); the run waits for {self.waiting_for()}"
            )

    # ---- state -------------------------------------------------------------------

    @property
    def training_over(self) -> bool:
        """No further step: the last one is done, or the data is exhausted."""
        if self.trainers.train_step >= self.config.run.total_steps:
            return True
        return self.admission.exhausted and not (self.leases or self.batcher or self.trainers.step_sent)

    @property
    def finished(self) -> bool:
        """Training is over, its last version was served, evaluated and saved.

        Raises RuntimeError if the data ended without a single step.
        """
        trainers, step = self.trainers, self.trainers.train_step
        if not self.training_over or trainers.busy or trainers.pending_publish is not None:
            return False
        if step == self._first_step == 0:
            raise RuntimeError(
                f"the data ended without a training step: of {self.admission.cursor.position} prompts "
                f"{self.counters['dropped']} were dropped, {self.counters['discarded (equal rewards)']} had "
                "answers of equal reward"
            )
        if self.evaluator.running is not None or self.evaluator.due(step, last=True):
            return False
        return self._exported and trainers.saved_step >= step

    def waiting_for(self) -> str:
        trainers = self.trainers
        if trainers.step_sent:
            return f"{self._lead()} to finish step {trainers.train_step + 1}"
        if trainers.publishing:
            return f"{self._lead()} and all engines to bring version {trainers.version} into service"
        if self.evaluator.running is not None:
            return f"rollouts to answer the evaluation of version {self.evaluator.running.version}"
        if trainers.saving:
            return f"{self._lead()} to save step {trainers.train_step}"
        holders = sorted(self.leases.holders())
        whom = ", ".join(map(self.world.describe, holders[:8])) or "a rollout with room"
        if len(holders) > 8:
            whom += f" and {len(holders) - 8} more"
        if self._held_for is not None:
            return f"groups that were begun at version {self._held_for} (the bound is {self.eta}) from {whom}"
        return f"{len(self.leases)} groups from {whom}; {len(self.batcher)} are ready"

    def _lead(self) -> str:
        return self.world.describe(self.world.trainer_ranks[0])

    def status(self) -> dict[str, Any]:
        return {
            "state": "running",
            "name": self.config.run.name,
            "train_step": self.trainers.train_step,
            "total_steps": self.config.run.total_steps,
            "version": self.trainers.version,
            "live_version": self.trainers.live_version,
            "ready_groups": len(self.batcher),
            "groups_under_way": len(self.leases),
            "trajectories_outstanding": self.budget.outstanding,
            "places": (self.eta + 1) * self.config.trainer.batch_size,
            "epoch": self.admission.cursor.position // len(self.prompts.train),
            "waiting_for": self.waiting_for(),
            "counters": self.counted(),
        }

    def counted(self) -> dict[str, int]:
        """Faults, refusals and the like, over all attempts at the run."""
        leases = {"leases_expired": self.leases.num_expired, "duplicates": self.leases.num_duplicates}
        return self.progress.over_attempts(leases | self.counters | self.admission.counts)


def _signs(world: World) -> dict[int, RankSign]:
    sizes = len(world.trainer_ranks), len(world.rollout_ranks)
    return {rank: RankSign(role_of(rank, *sizes)[0], host) for rank, host in enumerate(world.hosts)}


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
