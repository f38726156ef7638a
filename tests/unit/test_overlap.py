"""weights.overlap: the controller trains on while a version is on its way, within the same bounds."""

from __future__ import annotations

import os

import pytest

from areal_hpc.analysis.audit import audit
from areal_hpc.controller import loop, progress, shutdown, startup
from areal_hpc.messages import Message, Publish, PublishFailed, TrainBatch, VersionLive
from areal_hpc.paths import RunPaths
from controller_world import Disk, Faults, FakeWorld, make_config


class SlowPublication(FakeWorld):
    """Trainers that publish from a copy; notes in which order commands and live versions come."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.order: list[Message] = []
        self.copied = 0
        super().__init__(*arguments, **options)

    def _tell(self, source: int, message: Message) -> None:
        if isinstance(message, VersionLive):
            self.order.append(message)
        super()._tell(source, message)

    def _command(self, rank: int, message: Message) -> None:
        if rank == self.trainer_ranks[0]:
            self.order.append(message)
        if rank != self.trainer_ranks[0] or not isinstance(message, Publish):
            super()._command(rank, message)
            return
        self.commands.append(message)
        if message.version != self.copied:
            assert message.version == self.version, "neither the newest version nor the one that was copied"
            self.copied = message.version
        if self.random.random() < self.faults.publish:
            self._answer_later(1, PublishFailed(message.version, "test"))
        else:
            self.served = message.version
            self._answer_later(1, VersionLive(message.version, {"total_s": 0.1}))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("overlap", [False, True])
def test_training_overlaps_with_publication_only_if_told(tmp_path, monkeypatch, seed, overlap):
    monkeypatch.setattr(progress, "echo", lambda line: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for module, name in ((loop, "IDLE_S"), (shutdown, "POLL_S"), (startup, "POLL_S")):
        monkeypatch.setattr(module, name, 0.0)
    config = make_config(tmp_path, run__total_steps=12, checkpoint__every=5, weights__overlap=overlap)
    config.weights.max_retries = 20
    world = SlowPublication(config, RunPaths(tmp_path / "run"), Disk(), seed, Faults(publish=0.2, fail=0.05))
    world.run()
    assert audit(world.paths).problems == []
    assert [step.version for step in world.history] == list(range(12))
    samples = [sample for step in world.history for sample in step.samples]
    assert len(samples) == len(set(samples)) == 12 * 8
    assert max(step.version - low for step in world.history for low in step.min_versions) <= 2
    assert world.served == 12
    overlapped, publishing = 0, False
    for message in world.order:
        if isinstance(message, TrainBatch):
            overlapped += publishing
        elif isinstance(message, (Publish, VersionLive)):
            publishing = isinstance(message, Publish)
    assert bool(overlapped) == overlap
