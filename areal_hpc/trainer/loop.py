"""The trainer role: executes the controller's commands in order, in lockstep over all trainer ranks.

      TrainBatch ----> read shards -> train -> StepDone, or BatchRefused if they are damaged
      Publish -------> weights to every engine -> VersionLive or PublishFailed
      SaveCheckpoint > checkpoint (and Hugging Face folder) -> CheckpointSaved
      Stop ----------> leave

The controller sends the same commands to every trainer rank; only the lead answers.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.config.schema import Config
from areal_hpc.messages import (
    BatchRefused,
    CheckpointSaved,
    ConnectWeights,
    Message,
    Publish,
    PublishFailed,
    Rendezvous,
    SaveCheckpoint,
    StepDone,
    Stop,
    TrainBatch,
    TrainerReady,
    VersionLive,
    WeightsConnected,
)
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry

if TYPE_CHECKING:
    from areal_hpc.mpi.world import World
    from areal_hpc.trainer.checkpoint import Saved
    from areal_hpc.trainer.parallel import Place
    from areal_hpc.weights.transfer import Publication

log = logging.getLogger(__name__)

COMMANDS = (ConnectWeights, TrainBatch, Publish, SaveCheckpoint, Stop)
CHECKPOINT_POLL_S = 0.25
"""How often an idle trainer looks whether its checkpoint is written."""
PUBLICATION_POLL_S = 0.01
"""The same for a publication in the background: admission waits for its end."""


def run(config: Config, world: World, paths: RunPaths, telemetry: Telemetry) -> None:
    """Serve the controller until it says stop."""
    trainer = Trainer(config, world, paths, telemetry)
    trainer.report_ready()
    while True:
        command = trainer.next_command()
        if isinstance(command, Stop):
            break
        if isinstance(command, ConnectWeights):
            trainer.connect_weights(command)
        elif isinstance(command, TrainBatch):
            trainer.train(command)
        elif isinstance(command, Publish):
            trainer.publish(command)
        elif isinstance(command, SaveCheckpoint):
            trainer.save_checkpoint(command)
    trainer.close()


def meet(config: Config, world: World) -> Place:
    """Join the other trainer ranks: the lead picks a free port and tells them."""
    from areal_hpc.trainer import parallel

    trainer = config.trainer
    lead = world.trainer_ranks[0]
    if world.is_trainer_lead:
        meeting = Rendezvous(purpose="trainer", host=world.host, port=parallel.free_port())
        for rank in world.trainer_ranks[1:]:
            world.channel.send(rank, meeting)
    else:
        meeting = world.channel.receive(
            Rendezvous, config.run.start_deadline_s, "the trainers' meeting point", source=lead
        ).message
    single_host = len({world.hosts[rank] for rank in world.trainer_ranks}) == 1
    return parallel.start(
        parallel.Layout(tp=trainer.tp, pp=trainer.pp, dp=trainer.dp, ep=trainer.ep),
        rank=world.role_rank,
        # A host's own name need not resolve to an address it listens on.
        host="127.0.0.1" if single_host else meeting.host,
        port=meeting.port,
        device=config.run.device.value,
        timeout_s=config.run.start_deadline_s,
        seed=config.run.seed,
    )


class Trainer:
    """One trainer rank: engine, step, weights and checkpoints, driven by commands."""

    def __init__(self, config: Config, world: World, paths: RunPaths, telemetry: Telemetry) -> None:
        self._config, self._world, self._paths, self._telemetry = config, world, paths, telemetry
        begin = time.perf_counter()
        self._place = meet(config, world)
        from areal_hpc.trainer.build import build_step
        from areal_hpc.trainer.checkpoint import Checkpoints
        from areal_hpc.weights.transfer import TrainerWeights

        self._engine, self._step = build_step(config, self._place, paths, telemetry)
        self._checkpoints = Checkpoints(config, paths, self._step.engines, config.run.start_deadline_s)
        self.train_step = self._checkpoints.load_newest()
        self._weights = TrainerWeights(
            config, world, paths, self._engine.hf_metadata, self._engine.named_hf_tensors, telemetry
        )
        log.info("trainer ready at step %d after %.1f s", self.train_step, time.perf_counter() - begin)

    def next_command(self) -> Message:
        """Wait for the controller, polling with short sleeps; a finished checkpoint is reported meanwhile."""
        run = self._config.run
        limit_s = run.stall_deadline_s + run.start_deadline_s
        end = time.monotonic() + limit_s
        with self._telemetry.span("train.wait"):
            while True:
                self._report_saved(self._checkpoints.finished())
                self._report_published(self._weights.finished())
                try:
                    poll_s = PUBLICATION_POLL_S if self._weights.in_progress else CHECKPOINT_POLL_S
                    return self._world.channel.receive(
                        COMMANDS, poll_s, "a command", source=self._world.controller_rank
                    ).message
                except TimeoutError:
                    if time.monotonic() > end:
                        whom = self._world.describe(self._world.controller_rank)
                        raise TimeoutError(
                            f"waited {limit_s:.0f} s (run.stall_deadline_s and run.start_deadline_s) for a command "
                            f"from {whom}"
                        ) from None

    def report_ready(self) -> None:
        self._answer(TrainerReady(train_step=self.train_step, version=self.train_step))

    def connect_weights(self, command: ConnectWeights) -> None:
        self._weights.connect(command.rollout_ranks)
        self._answer(WeightsConnected())

    def train(self, command: TrainBatch) -> None:
        manifest = command.manifest
        if manifest.train_step != self.train_step + 1 or manifest.version != self.train_step:
            raise RuntimeError(
                f"batch for step {manifest.train_step} from version {manifest.version} came after step "
                f"{self.train_step}: the controller's and the trainer's counts differ"
            )
        from areal_hpc.trainer.reading import BatchDamaged

        try:
            with self._telemetry.span("train.step", train_step=manifest.train_step) as attributes:
                metrics = self._step.run(manifest)
                attributes["num_tokens"] = metrics["num_tokens"]
        except BatchDamaged as error:
            log.warning("batch of step %d refused: %s", manifest.train_step, error)
            self._answer(BatchRefused(train_step=manifest.train_step, damaged=error.damaged))
            return
        self.train_step = manifest.train_step
        self._answer(StepDone(train_step=self.train_step, version=self.train_step, metrics=metrics))

    def publish(self, command: Publish) -> None:
        """Send the weights; with weights.overlap only copy them, the answer comes from `next_command`."""
        if self._config.weights.overlap:
            self._weights.begin(command.version)
        else:
            self._report_published(self._weights.attempt(command.version))

    def _report_published(self, publication: Publication | None) -> None:
        if publication is None:
            return
        if publication.error:
            self._answer(PublishFailed(version=publication.version, reason=publication.error))
        else:
            self._answer(VersionLive(version=publication.version, timings=publication.timings))

    def save_checkpoint(self, command: SaveCheckpoint) -> None:
        """Copy the state and go on: the answer comes when the checkpoint is whole on disk."""
        from areal_hpc.trainer.export import export_hf

        self._report_saved(self._checkpoints.wait(self._config.run.stall_deadline_s))
        with self._telemetry.span("train.checkpoint", train_step=command.train_step):
            self._checkpoints.save(command.train_step, command.version)
        if command.export_hf:
            with self._telemetry.span("train.export", train_step=command.train_step):
                export_hf(self._engine, self._paths.export(command.train_step), Path(self._config.model.tokenizer))

    def _report_saved(self, saved: Saved | None) -> None:
        if saved is not None:
            self._telemetry.value("checkpoint.seconds", saved.seconds, train_step=saved.train_step)
            self._answer(
                CheckpointSaved(
                    train_step=saved.train_step, path=self._paths.relative(saved.path), seconds=saved.seconds
                )
            )

    def close(self) -> None:
        from areal_hpc.trainer import parallel

        self._report_saved(self._checkpoints.wait(self._config.run.stall_deadline_s))
        self._weights.close()
        parallel.stop()

    def _answer(self, message: Message) -> None:
        if self._world.is_trainer_lead:
            self._world.channel.send(self._world.controller_rank, message)
