"""The controller is killed at every durable step of its own (fsync, rename), one after the other.

Each death is tried on both sides: just before the call, with what was not synced cut at a
random byte as a node's power loss would, and just after it. A second life follows on what is
left; the audit, which reads journal and spool independently, judges after each.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_hpc.analysis.audit import audit
from areal_hpc.controller import loop, progress, shutdown, startup
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.paths import RunPaths
from controller_world import Crash, Disk, Faults, FakeWorld, make_config

SEED = 20260101
NUM_PROMPTS, GROUP_SIZE, EPOCHS, STEPS = 6, 2, 2, 4
OPTIONS = {
    "num_prompts": NUM_PROMPTS, "rollout__group_size": GROUP_SIZE, "data__epochs": EPOCHS, "trainer__batch_size": 6,
    "run__total_steps": STEPS, "checkpoint__every": 1, "rollout__max_attempts": 1000,
}  # fmt: skip
SIDES = ("before", "after")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(progress, "echo", lambda line: None)
    for name in ("__init__", "scalars", "close"):
        monkeypatch.setattr(progress.TensorBoard, name, lambda *_: None)
    for module, name in ((loop, "IDLE_S"), (shutdown, "POLL_S"), (startup, "POLL_S")):
        monkeypatch.setattr(module, name, 0.0)


class Deaths:
    """Stands in for os.fsync, os.rename and os.replace: counts the controller's calls, crashes at one."""

    def __init__(self, at: int, side: str, seed: int) -> None:
        self.at, self.side, self.calls, self.kinds = at, side, 0, set()
        self.ranks_work = False
        self._random = random.Random(seed)
        self._synced: dict[str, int] = {}
        self._rename, self._replace = os.rename, os.replace

    def fsync(self, descriptor: int) -> None:
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        size = os.fstat(descriptor).st_size
        synced = self._synced.setdefault(file, 0)
        if self._due("fsync") and self.side == "before":
            # Some of what was written since the last time is on the disk, up to any byte.
            if not os.path.isdir(file):
                os.ftruncate(descriptor, self._random.randint(min(synced, size), size))
            raise Crash
        self._synced[file] = size
        self._die_after()

    def rename(self, source: os.PathLike, target: os.PathLike) -> None:
        self._move("rename", self._rename, source, target)

    def replace(self, source: os.PathLike, target: os.PathLike) -> None:
        self._move("replace", self._replace, source, target)

    def _move(self, kind, move, source, target) -> None:
        if self._due(kind) and self.side == "before":
            raise Crash
        move(source, target)
        self._die_after()

    def _due(self, kind: str) -> bool:
        if self.ranks_work:
            return False
        self.calls += 1
        self.kinds.add(kind)
        return self.calls == self.at

    def _die_after(self) -> None:
        if not self.ranks_work and self.calls == self.at:
            raise Crash

    def known(self, path: Path) -> None:
        """What lies at `path` is from an earlier life and safe."""
        if path.exists():
            self._synced[os.path.realpath(path)] = path.stat().st_size


class Ranks(FakeWorld):
    """The other ranks, whose own writes do not count."""

    deaths: Deaths

    def turn(self) -> None:
        with self._at_work():
            super().turn()

    def send(self, dest: int, data: bytes) -> None:
        with self._at_work():
            super().send(dest, data)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self.deaths.ranks_work = True
        try:
            yield
        finally:
            self.deaths.ranks_work = False


def live(folder: Path, disk: Disk, seed: int, faults: Faults | None = None, at: int = -1, side: str = "") -> Ranks | None:
    """One life of the run in `folder`; None if it ended by the crash at the controller's call number `at`."""
    world = Ranks(make_config(folder, **OPTIONS), RunPaths(folder / "run"), disk, seed, faults)
    world.deaths = deaths = Deaths(at, side, seed + at)
    deaths.known(world.paths.ledger)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "rename", "replace"):
            patch.setattr(os, name, getattr(deaths, name))
        try:
            world.run()
        except Crash:
            world.mend()
            world = None
    result = audit(RunPaths(folder / "run"))
    assert result.problems == [], f"seed {seed}, crash {side} call {at}"
    return world


def check_whole(world: Ranks | None, what: str) -> None:
    """The run ended where an undisturbed one would: each sample trained once."""
    assert world is not None and world.train_step == STEPS, what
    trained = sorted(sample for step in world.history for sample in step.samples)
    assert trained == [(group, k) for group in range(EPOCHS * NUM_PROMPTS) for k in range(GROUP_SIZE)], what


@pytest.mark.parametrize("side", SIDES)
def test_a_crash_at_every_durable_step_of_a_run(tmp_path, side):
    print(f"seed {SEED}")
    faults = Faults(unread=0.3, duplicate=0.2, fail=0.1)
    at = 0
    while True:
        at += 1
        folder, disk = tmp_path / str(at), Disk()
        folder.mkdir()
        world = live(folder, disk, SEED, faults, at, side)
        if world is not None:
            break
        check_whole(live(folder, disk, SEED + 1), f"seed {SEED}, crash {side} call {at}")
        shutil.rmtree(folder)
    check_whole(world, f"seed {SEED}")
    assert at > 25 and world.deaths.kinds == {"fsync", "rename", "replace"}


@pytest.mark.parametrize("side", SIDES)
def test_a_crash_at_every_durable_step_of_a_recovery(tmp_path, side):
    """The life before was stopped with answers unfinished, one of its shards is damaged, then it dies again."""
    print(f"seed {SEED}")
    begun, disk = tmp_path / "begun", Disk()
    begun.mkdir()
    assert live(begun, disk, SEED, Faults(stop_at=25, straggler=0.3)) is not None
    shard = damage_a_shard_that_waits(RunPaths(begun / "run"))
    at = 0
    while True:
        at += 1
        folder, kept = tmp_path / str(at), copy.deepcopy(disk)
        shutil.copytree(begun, folder)
        if at > 1:
            world = live(folder, kept, SEED + 1, None, at - 1, side)
            if world is not None:
                break
        check_whole(live(folder, kept, SEED + 2), f"seed {SEED}, crash {side} call {at - 1} of the recovery")
        assert not (folder / "run" / shard).exists() and list((folder / "run" / "quarantine").iterdir())
        shutil.rmtree(folder)
    check_whole(world, f"seed {SEED}")
    assert at > 15 and world.deaths.kinds == {"fsync", "rename", "replace"}


def damage_a_shard_that_waits(paths: RunPaths) -> str:
    """Zero a shard none of whose groups was trained; its name in the journal."""
    records = list(read_ledger(paths.ledger))
    consumed = {group for record in records if record["k"] == "consumed" for group in record["groups"]}
    waiting = [
        record["path"] for record in records
        if record["k"] == "committed" and not consumed & {group["group"] for group in record["groups"]}
    ]  # fmt: skip
    file = paths.root / waiting[-1]
    file.write_bytes(bytes(file.stat().st_size))
    return waiting[-1]
