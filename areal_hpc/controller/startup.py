"""Before the first lease: every rank has loaded, weights are connected, the past is recovered."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from areal_hpc.config.changes import describe_changes, settings
from areal_hpc.config.load import config_digest, training_warnings
from areal_hpc.config.schema import Config
from areal_hpc.controller.ledger import Ledger, read_ledger
from areal_hpc.controller.progress import Progress
from areal_hpc.controller.recovery import (
    Recovered,
    adopt_orphans,
    begin_other_prompts,
    leave_earlier_prompts,
    replay_ledger,
    verify_shards,
)
from areal_hpc.data.datasets import PromptSets
from areal_hpc.data.identity import prompts_identity
from areal_hpc.messages import (
    ConnectWeights,
    EngineRestarted,
    Message,
    Publish,
    PublishFailed,
    RewardReady,
    RewardStatus,
    RolloutReady,
    RolloutStatus,
    TrainerReady,
    VersionLive,
    WeightsConnected,
)
from areal_hpc.mpi.world import World
from areal_hpc.paths import RunPaths
from areal_hpc.stop import StopFlag

log = logging.getLogger(__name__)
POLL_S = 0.01


class StoppedEarly(Exception):
    """A stop was requested before the run began."""


@dataclass(frozen=True)
class Ready:
    """What the ranks reported: the step that the trainer stands at, sequences per rollout rank."""

    train_step: int
    capacities: dict[int, int]


def staleness_bound(config: Config) -> int:
    """eta; the synchronous system is the same one with eta = 0."""
    return 0 if config.run.mode.value == "sync" else config.algorithm.max_staleness


def wait_for_ranks(config: Config, world: World, progress: Progress, stop: StopFlag) -> Ready:
    """Wait until all ranks have loaded; raises TimeoutError naming those that have not."""
    train_step: int | None = None
    capacities: dict[int, int] = {}
    scorers: set[int] = set()
    end = time.monotonic() + config.run.start_deadline_s
    while (
        train_step is None or len(capacities) < len(world.rollout_ranks) or len(scorers) < len(world.reward_ranks)
    ):
        for source, message in world.channel.poll():
            progress.heard(source)
            if isinstance(message, TrainerReady):
                train_step = message.train_step
            elif isinstance(message, RolloutReady):
                capacities[source] = message.capacity
            elif isinstance(message, RewardReady):
                scorers.add(source)
        late = [rank for rank in world.rollout_ranks if rank not in capacities]
        late += [world.trainer_ranks[0]] if train_step is None else []
        late += [rank for rank in world.reward_ranks if rank not in scorers]
        progress.write_status(
            lambda late=late: {"state": "starting", "waiting_for": _names(world, late) + " to load"}
        )
        if stop:
            raise StoppedEarly
        if time.monotonic() > end:
            raise TimeoutError(
                f"waited {config.run.start_deadline_s:g} s (run.start_deadline_s) for "
                f"{_names(world, late)} to load"
            )
        time.sleep(POLL_S)
    return Ready(train_step, capacities)


def _names(world: World, ranks: list[int]) -> str:
    shown = [world.describe(rank) for rank in ranks[:8]]
    return ", ".join(shown) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def connect_weights(config: Config, world: World, progress: Progress, version: int) -> None:
    """Build the transfer group; a resumed trainer publishes its version before any lease."""
    message = ConnectWeights(world.rollout_ranks)
    for rank in (*world.trainer_ranks, *world.rollout_ranks):
        world.channel.send(rank, message)
    _await(config, world, progress, WeightsConnected, "the weight transfer group")
    for attempt in range(config.weights.max_retries + 1 if version > 0 else 0):
        for rank in world.trainer_ranks:
            world.channel.send(rank, Publish(version))
        what = f"version {version} to be live"
        answer = _await(config, world, progress, (VersionLive, PublishFailed), what)
        if isinstance(answer, VersionLive):
            break
        progress.event(f"the resumed version {version} was not published: {answer.reason}")
        if attempt == config.weights.max_retries:
            raise RuntimeError(f"the resumed version {version} could not be published: {answer.reason}")


def _await(
    config: Config, world: World, progress: Progress, kinds: type[Message] | tuple[type[Message], ...], what: str
) -> Message:
    deadline_s = config.weights.timeout_s + config.run.start_deadline_s
    answer = world.channel.receive(kinds, deadline_s, what, source=world.trainer_ranks[0])
    progress.heard(answer.source)
    for source, message in world.channel.poll():
        progress.heard(source)
        # Nothing was granted yet: rollouts and reward ranks only report how they are.
        if isinstance(message, RolloutStatus):
            progress.rollout_status(source, message)
        elif isinstance(message, RewardStatus):
            progress.heard(source, **message.counters)
        elif isinstance(message, EngineRestarted):
            progress.event(f"the engine of {world.describe(source)} was restarted: {message.cause}")
        else:
            raise RuntimeError(f"{type(message).__name__} from {world.describe(source)} before the first lease")
    return answer.message


def open_ledger(
    config: Config, paths: RunPaths, prompts: PromptSets, train_step: int, progress: Progress
) -> tuple[Ledger, Recovered]:
    """Read the journal of earlier attempts, look after their shards and begin this attempt."""
    identity, values, num_prompts = prompts_identity(config, prompts), settings(config), len(prompts.train)
    state = replay_ledger(read_ledger(paths.ledger, repair=True), train_step, values)
    ledger = Ledger(paths.ledger)
    changes = describe_changes(state.settings, values) if state.settings else []
    restarted = bool(state.data) and state.data != identity
    if restarted:
        begin_other_prompts(state, num_prompts)
    state.attempt += 1
    progress.set_attempt(state.attempt, train_step, state.counters)
    ledger.add(
        "run",
        attempt=state.attempt,
        train_step=train_step,
        data=identity,
        config=config_digest(config),
        settings=values,
        first_group=state.first_group,
        batch_size=config.trainer.batch_size,
        group_size=config.rollout.group_size,
        max_staleness=staleness_bound(config),
        overlap=config.weights.overlap,
        num_prompts=num_prompts,
        time=time.time(),
        counters=dict(progress.earlier),
    )
    for warning in training_warnings(config):
        progress.event(f"warning: {warning}")
    if changes:
        progress.event(f"changed since the last attempt, from step {train_step} on: {'; '.join(changes)}")
    if state.attempt > 1:
        num_left = leave_earlier_prompts(state, ledger)
        if restarted:
            progress.event(
                f"warning: the training prompts or their order changed (digest {identity[:12]}): they begin anew at "
                f"step {train_step}; {num_left} groups of the earlier ones are left out"
            )
        run_id = config.run.name
        num_lost = verify_shards(state, ledger, paths, run_id)
        num_adopted = adopt_orphans(
            state, ledger, paths, run_id, group_size=config.rollout.group_size, num_prompts=num_prompts
        )
        num_mixed = sum(
            row.max_version > group.newest_version for group in state.ready.values() for row in group.rows
        )
        progress.event(
            f"attempt {state.attempt} goes on from step {train_step}: {len(state.ready)} groups ready "
            f"({state.num_returned} of them consumed after the checkpoint, {num_adopted} found in the spool; {num_mixed} "
            "answers have tokens of versions that are made anew), "
            f"{len(state.in_flight)} asked again ({num_lost} of them damaged, {len(state.unfinished)} with unfinished "
            "answers to go on with)"
        )
    ledger.sync()
    return ledger, state
