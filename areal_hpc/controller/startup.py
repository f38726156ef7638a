"""Before the first lease: every rank has loaded, weights are connected, the past is recovered."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.config.load import config_digest
from areal_hpc.config.schema import Config
from areal_hpc.controller.ledger import Ledger, Recovered, read_ledger, recover
from areal_hpc.controller.progress import Progress
from areal_hpc.data.datasets import PromptSets
from areal_hpc.messages import (
    ConnectWeights,
    Message,
    Publish,
    PublishFailed,
    RolloutReady,
    RolloutStatus,
    TrainerReady,
    VersionLive,
    WeightsConnected,
)
from areal_hpc.mpi.world import World

log = logging.getLogger(__name__)
POLL_S = 0.01


@dataclass(frozen=True)
class Ready:
    """What the ranks reported: the step that the trainer stands at, sequences per rollout rank."""

    train_step: int
    capacities: dict[int, int]


def wait_for_ranks(config: Config, world: World, progress: Progress, prompts: PromptSets) -> Ready:
    """Wait until all ranks have loaded; raises TimeoutError naming those that have not."""
    train_step: int | None = None
    capacities: dict[int, int] = {}
    end = time.monotonic() + config.run.start_deadline_s
    while train_step is None or len(capacities) < len(world.rollout_ranks):
        for source, message in world.channel.poll():
            progress.heard(source)
            if isinstance(message, TrainerReady):
                train_step = message.train_step
            elif isinstance(message, RolloutReady):
                capacities[source] = message.capacity
        progress.write_status(
            lambda: {"state": "starting", "waiting_for": f"{len(world.rollout_ranks) - len(capacities)} rollouts, "
                     f"{int(train_step is None)} trainer", "num_prompts": len(prompts.train)}
        )
        if time.monotonic() > end:
            late = [world.describe(rank) for rank in world.rollout_ranks if rank not in capacities]
            late += [world.describe(world.trainer_ranks[0])] if train_step is None else []
            raise TimeoutError(f"waited {config.run.start_deadline_s:.0f} s for {', '.join(late)} to load")
        time.sleep(POLL_S)
    return Ready(train_step, capacities)


def connect_weights(config: Config, world: World, progress: Progress, version: int) -> None:
    """Build the transfer group; a resumed trainer publishes its version before any lease."""
    message = ConnectWeights(world.rollout_ranks)
    for rank in (*world.trainer_ranks, *world.rollout_ranks):
        world.channel.send(rank, message)
    _await(config, world, progress, WeightsConnected, "the weight transfer group")
    if version > 0:
        for rank in world.trainer_ranks:
            world.channel.send(rank, Publish(version))
        answer = _await(config, world, progress, (VersionLive, PublishFailed), f"version {version} to be live")
        if isinstance(answer, PublishFailed):
            raise RuntimeError(f"the resumed version {version} could not be published: {answer.reason}")


def _await(config: Config, world: World, progress: Progress, kinds, what: str) -> Message:
    answer = world.channel.receive(
        kinds, config.weights.timeout_s + config.run.start_deadline_s, what, source=world.trainer_ranks[0]
    )
    progress.heard(answer.source)
    for source, message in world.channel.poll():
        # Nothing was granted yet: rollouts only report how they are.
        assert isinstance(message, RolloutStatus), f"unexpected {type(message).__name__} before the first lease"
        progress.rollout_status(source, message)
    return answer.message


def open_ledger(path: Path, config: Config, prompts: PromptSets, train_step: int) -> tuple[Ledger, Recovered]:
    """Read the journal of earlier attempts and begin this one.

    Raises RuntimeError if the training prompts are not those that the run began with.
    """
    state = recover(read_ledger(path, repair=True), train_step)
    if state.data_digest and state.data_digest != prompts.digest:
        raise RuntimeError(
            "data.train is not what this run began with (its digest differs); restore it, or start "
            "another run with a run.folder of its own"
        )
    digest = config_digest(config)
    if state.config_digest and state.config_digest != digest:
        log.warning("the configuration changed since the last attempt; the new one holds from step %d", train_step)
    ledger = Ledger(path)
    state.attempt += 1
    ledger.add(
        "run", attempt=state.attempt, train_step=train_step, data_digest=prompts.digest, config_digest=digest,
        batch_size=config.trainer.batch_size, group_size=config.rollout.group_size,
        max_staleness=staleness_bound(config), time=time.time(),
    )  # fmt: skip
    ledger.sync()
    return ledger, state


def staleness_bound(config: Config) -> int:
    """eta; the synchronous system is the same one with eta = 0."""
    return 0 if config.run.mode.value == "sync" else config.algorithm.max_staleness
