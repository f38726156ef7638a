"""What the trainers are doing and what they are told next: train, publish, save.

All trainer ranks get the same commands in the same order and the lead answers; at most
one command of each kind is under way. A batch is sent once the version before it serves,
with weights.overlap already while that version is being published; a step never has to be
taken back for a failed publication, since the trainers keep a copy of what they publish.
"""

from __future__ import annotations

from areal_hpc.config.schema import Config
from areal_hpc.controller.batcher import ReadyGroup, make_manifest
from areal_hpc.messages import (
    BatchRefused,
    CheckpointSaved,
    Message,
    Publish,
    PublishFailed,
    SaveCheckpoint,
    StepDone,
    TrainBatch,
    VersionLive,
)
from areal_hpc.mpi.world import World


class Trainers:
    """`train_step` and `version` are the trainers', `live_version` is what the engines serve.

    `batch`: groups being trained. Groups trained into a version that is not live yet are
    kept until it is: they still take their places.
    """

    def __init__(self, config: Config, world: World, train_step: int) -> None:
        self._config, self._world = config, world
        self.train_step = self.version = self.live_version = self.saved_step = train_step
        self.batch: list[ReadyGroup] = []
        self._trained: list[tuple[int, list[ReadyGroup]]] = []
        self.step_sent = self.publishing = self.saving = False
        self.pending_publish: int | None = None
        self.checkpoint_due = False
        self._ordered_step = train_step
        self._publish_failures = 0
        self._refusals = 0

    @property
    def busy(self) -> bool:
        """A command is under way."""
        return self.step_sent or self.publishing or self.saving

    @property
    def free(self) -> bool:
        """The next batch may be sent: the step before is done, if it was due being saved, and live.

        With weights.overlap the newest version may still be on its way, the one before it may not.
        """
        waiting = self.step_sent or self.checkpoint_due or self.pending_publish is not None
        return not waiting and len(self._trained) <= int(self._config.weights.overlap)

    @property
    def num_in_batch(self) -> int:
        """Trajectories being trained, or trained and not live."""
        groups = [*self.batch, *(group for _, trained in self._trained for group in trained)]
        return sum(len(group.rows) for group in groups)

    def train(self, groups: list[ReadyGroup]) -> None:
        self.batch = groups
        self.step_sent = True
        manifest = make_manifest(
            groups, train_step=self.train_step + 1, version=self.version, dp=self._config.trainer.dp
        )
        self._send(TrainBatch(manifest))

    def step_done(self, message: StepDone) -> None:
        self.step_sent, self._refusals = False, 0
        self.train_step = message.train_step
        self.version = self.pending_publish = message.version
        self._trained.append((message.version, self.batch))
        self.batch = []
        every = self._config.checkpoint.every
        if every and self.train_step % every == 0:
            self.checkpoint_due = True

    def batch_refused(self, message: BatchRefused) -> list[ReadyGroup]:
        """The groups of the batch, untrained. Raises RuntimeError if this goes on and on."""
        self.step_sent = False
        self._refusals += 1
        if self._refusals > self._config.rollout.max_attempts:
            path, reason = next(iter(message.damaged.items()))
            raise RuntimeError(
                f"the trainers could not read {self._refusals} batches in a row, the last one for {path}: {reason}"
            )
        groups, self.batch = self.batch, []
        return groups

    def publish(self) -> None:
        """Send the newest weights to the engines, if that is pending."""
        if self.pending_publish is not None and not self.publishing:
            self._send(Publish(self.pending_publish))
            self.pending_publish, self.publishing = None, True

    def version_live(self, message: VersionLive) -> list[ReadyGroup]:
        """The groups that were trained into it: their places are free now."""
        self.publishing, self._publish_failures = False, 0
        self.live_version = message.version
        live = [groups for version, groups in self._trained if version <= message.version]
        self._trained = self._trained[len(live) :]
        return [group for groups in live for group in groups]

    def publish_failed(self, message: PublishFailed) -> None:
        """Try again. Raises RuntimeError after weights.max_retries."""
        self.publishing = False
        self._publish_failures += 1
        if self._publish_failures > self._config.weights.max_retries:
            raise RuntimeError(
                f"version {message.version} could not be published in {self._publish_failures} attempts: "
                f"{message.reason}"
            )
        # A step that was done meanwhile goes out instead.
        self.pending_publish = max(message.version, self.version)

    def save(self, *, export_hf: bool) -> bool:
        """Order a checkpoint if it is due and the step is published; whether that was so."""
        if not self.checkpoint_due or self.pending_publish is not None or self.publishing:
            return False
        self._send(SaveCheckpoint(self.train_step, self.version, export_hf))
        self.checkpoint_due, self.saving, self._ordered_step = False, True, self.train_step
        return True

    def checkpoint_saved(self, message: CheckpointSaved) -> None:
        self.saved_step = message.train_step
        # While one checkpoint was being written the next one may have been ordered.
        self.saving = self.saved_step < self._ordered_step

    def give_up_publishing(self) -> None:
        """At a stop: nobody needs the newest version any more."""
        self.pending_publish = None

    def _send(self, message: Message) -> None:
        for rank in self._world.trainer_ranks:
            self._world.channel.send(rank, message)
