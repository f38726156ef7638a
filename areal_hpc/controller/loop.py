"""The controller: one loop that receives reports, grants leases and forms batches.

    prompts -> admission ---LEASE---> rollouts ---SHARD_READY---> batcher
                   ^                                                 |
                   +-- places <--- VERSION_LIVE <--- trainers <---TRAIN_BATCH

It owns every decision and the journal of them, computes nothing and never blocks in MPI.
Called by `main` with the controller's world; writes the ledger, the metrics, the status,
the answers of evaluations and the run's lock.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from areal_hpc import runlock
from areal_hpc.config.schema import Config
from areal_hpc.controller.admission import Admission
from areal_hpc.controller.batcher import Batcher, ReadyGroup, choose_epoch, split_groups
from areal_hpc.controller.boards import open_boards
from areal_hpc.controller.evaluation import Evaluator
from areal_hpc.controller.leases import LeaseBook, UnderWay
from areal_hpc.controller.ledger import last_run
from areal_hpc.controller.progress import Progress, RankSign, describe_batch
from areal_hpc.controller.prompts import PromptCursor
from areal_hpc.controller.recovery import TOO_OLD, Recovered, committed_record
from areal_hpc.controller.selection import keep_group
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
FRUITLESS_GROUPS = 1000
"""So many groups dropped in a row (or all prompts, if there are fewer) end the run."""


def run(config: Config, world: World, paths: RunPaths, telemetry: Telemetry, stop: StopFlag = FLAG) -> None:
    """Control the run to its end, or drain it when a stop is requested."""
    with runlock.acquire(paths.lock, take_over=config.run.take_over) as lock:
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
            lock.refresh()
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
        self.batcher = Batcher()
        for group in past.ready.values():
            self.batcher.add(group)
        self.admission = self._make_admission(ready.capacities, past)
        self.leases, self.budget = self.admission.leases, self.admission.budget
        self.counters: Counter[str] = Counter()
        self._first_step = ready.train_step
        self._exported = not config.checkpoint.export_hf or paths.export(ready.train_step).exists()
        self._held_for: int | None = None
        self._num_fruitless = 0
        self._num_refused = 0
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
            if not isinstance(message, RolloutStatus):
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
            case UnfinishedSaved():
                self._note_unfinished(message)
            case LeaseFailed():
                ended = [self.leases.fail(message.lease_id, retry=message.retry)]
                self._end_leases(ended, message.reason, by_chance=message.retry)
            case EngineRestarted():
                self._engine_restarted(source, message)
            case EvalResult():
                self._take_evaluation(message)
            case StepDone():
                self._step_done(message)
            case BatchRefused():
                self._batch_refused(message)
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

    def _take_shard(self, shard: ShardReady) -> None:
        accepted: list[ReadyGroup] = []
        for group_id, rows in split_groups(shard.rows).items():
            group = self.leases.complete(group_id)
            if group is not None:
                accepted.append(ReadyGroup(group_id, group.epoch, shard.path, rows))
        if not accepted:
            return
        self.ledger.add("committed", **committed_record(shard.path, shard.digest, accepted))
        self._num_fruitless = 0
        self.counters["trajectories"] += sum(len(group.rows) for group in accepted)
        per_batch = self.config.trainer.batch_size // self.config.rollout.group_size
        for group in accepted:
            if keep_group(
                group.rewards, self.config.algorithm, num_refused=self._num_refused, groups_per_batch=per_batch
            ):
                self.batcher.add(group)
            else:
                self._num_refused += 1
                self._discard([group], "equal rewards")

    def _note_unfinished(self, shard: UnfinishedSaved) -> None:
        """Answers that this stop cut short were saved: a resumed run goes on with them."""
        groups = [
            ReadyGroup(group_id, self.admission.cursor.at(group_id).epoch, shard.path, tuple(rows))
            for group_id, rows in itertools.groupby(shard.rows, key=lambda row: row.group_id)
            if group_id in self.leases
        ]
        self.ledger.add("unfinished", **committed_record(shard.path, shard.digest, groups))
        self.counters["answers_kept"] += sum(len(group.rows) for group in groups)
        self.counters["tokens_kept"] += sum(row.num_loss_tokens for group in groups for row in group.rows)

    def _discard(self, groups: list[ReadyGroup], reason: str) -> None:
        if not groups:
            return
        ids = [group.group_id for group in groups]
        self.ledger.add("discarded", groups=ids, train_step=self.trainers.train_step, reason=reason)
        self._give_back(groups)
        self.counters[f"discarded ({reason})"] += len(groups)

    def _give_back(self, groups: Iterable[ReadyGroup]) -> None:
        for group in groups:
            self.budget.release(group.epoch, len(group.rows))

    def _end_leases(
        self, ended: Iterable[tuple[UnderWay, bool] | None], reason: str, *, by_chance: bool = True
    ) -> None:
        """Journal and count leases that came to nothing; `by_chance`: another run's might have been answered."""
        for outcome in ended:
            if outcome is None:
                continue
            group, dropped = outcome
            if not dropped:
                self.counters["granted_again"] += 1
                continue
            if self.config.run.deterministic and by_chance:
                raise RuntimeError(
                    f"run.deterministic=true: group {group.group_id} would be left out for a reason that another run "
                    f"need not have: {reason}"
                )
            self.ledger.add("dropped", groups=[group.group_id], reason=reason)
            self.budget.release(group.epoch, self.config.rollout.group_size)
            self.counters["dropped"] += 1
            self._num_fruitless += 1
            log.warning("prompt %d dropped: %s", group.prompt.prompt_id, reason)
            if self.counters["dropped"] <= 5:
                self.progress.event(f"prompt {group.prompt.prompt_id} left out: {reason}")
            if self._num_fruitless >= min(FRUITLESS_GROUPS, len(self.prompts.train)):
                raise RuntimeError(
                    f"the last {self._num_fruitless} prompts were all dropped and none was answered; the last one "
                    f"because: {reason}"
                )

    def _engine_restarted(self, source: int, message: EngineRestarted) -> None:
        self.counters["engine_restarts"] += 1
        self.progress.event(
            f"the engine of {self.world.describe(source)} was restarted with version {message.version}: "
            f"{message.cause}; {len(message.lost_leases)} leases are granted again"
        )
        ended = [self.leases.fail(lease_id, retry=True) for lease_id in message.lost_leases]
        self._end_leases(ended, "the engine failed with it too often")

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
            "leases_expired": self.leases.num_expired,
            "duplicates": self.leases.num_duplicates,
            **self.counters,
            **self.admission.counts,
        }
        self.progress.step(values, message.metrics)

    def _batch_refused(self, message: BatchRefused) -> None:
        """Shards were damaged after they were announced: their groups are asked again."""
        from areal_hpc.spool.shard import quarantine

        groups = self.trainers.batch_refused(message)
        for path, reason in message.damaged.items():
            groups += self.batcher.remove_shard(path)
            lost = sorted(group.group_id for group in groups if group.path == path)
            self.ledger.add("damaged", path=path, groups=lost, reason=reason)
            if self.paths.resolve_inside(path).exists():
                quarantine(self.paths.resolve_inside(path), self.paths.quarantine, reason)
            self.progress.event(f"shard {path} cannot be read ({reason}); its {len(lost)} groups are asked again")
        self.ledger.add("unconsumed", train_step=message.train_step)
        for group in groups:
            if group.path in message.damaged:
                entry = self.admission.cursor.at(group.group_id)
                self.leases.admit(group.group_id, entry.epoch, entry.prompt, self.trainers.live_version)
            else:
                self.batcher.add(group)

    def _version_live(self, message: VersionLive) -> None:
        self._give_back(self.trainers.version_live(message))
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
        self._end_leases(self.leases.expire(time.monotonic()), reason)

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
        self._discard(self.batcher.discard_older(trainers.version - self.eta), TOO_OLD)
        size, group_size = self.config.trainer.batch_size, self.config.rollout.group_size
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
        self._num_refused = 0
        self._wait_s = time.monotonic() - self._idle_since

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
            "counters": {**self.counters, **self.admission.counts},
        }


def _signs(world: World) -> dict[int, RankSign]:
    num_trainers = len(world.trainer_ranks)
    return {rank: RankSign(role_of(rank, num_trainers)[0], host) for rank, host in enumerate(world.hosts)}


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
