"""Version numbers that come twice: a run goes back to a checkpoint and reaches the same numbers again.

Attempt 1 gets to version 6 and is killed; attempt 2 goes on from step 4. Expected distances
are counted by hand along the two histories, which part at version 4.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_hpc.analysis.audit import audit
from areal_hpc.analysis.trained import load_trained
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.controller.batcher import make_manifest, split_groups, ReadyGroup
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.controller.progress import describe_batch
from areal_hpc.controller.recovery import adopt_orphans, committed_record, replay_ledger
from areal_hpc.controller.surviving import SurvivingVersions
from areal_hpc.paths import RunPaths
from areal_hpc.replay.history import read_history
from areal_hpc.spool.shard import ShardWriter
from areal_hpc.trainer.history import WeightHistory
from areal_hpc.trainer.objective import _proximal
from areal_hpc.trainer.reading import read_batch
from areal_hpc.trainer.step import FreshGap
from areal_hpc.types import ALL_VERSIONS, PROMPT_VERSION, Trajectory
from controller_world import Disk
from run_folders import make_run, quicken

RUN = "run-a"
VERSIONS = ([4, 4], [4, 5], [5, 6], [6, 6])
"""Of the two trained tokens of each group's only sample, as stamped."""


def answer(group: int, versions: list[int]) -> Trajectory:
    return Trajectory(
        tokens=np.array([9, 1, 2], np.int32), loss_mask=np.array([0, 1, 1], np.uint8),
        rollout_logprobs=np.array([0, -1, -1], np.float32), versions=np.array([PROMPT_VERSION, *versions], np.int32),
        reward=1.0, prompt_id=group, group_id=group, sample_index=0, finish_reason="stop",
    )  # fmt: skip


class Resumed:
    """Attempt 1 committed VERSIONS as groups 0 to 3; attempt 2 starts, and commits group 4 at version 6."""

    def __init__(self, root, deterministic: bool = False) -> None:
        self.paths = RunPaths(root)
        self.paths.create()
        self.settings = {"run.deterministic": deterministic}
        self.records: list[dict] = []
        self.start(0)
        self.commit(0, [answer(group, list(versions)) for group, versions in enumerate(VERSIONS)])
        self.state = replay_ledger(self.records, 4, self.settings)
        self.start(4)
        self.commit(1, [answer(4, [5, 6])])

    def start(self, step: int) -> None:
        self.records.append({"k": "run", "attempt": 1, "data": "", "train_step": step, "settings": self.settings})

    def commit(self, rank: int, trajectories: list[Trajectory]) -> None:
        info = ShardWriter(self.paths.rollout_spool(rank), RUN, rank).commit(trajectories)
        path = self.paths.relative(info.path)
        groups = [ReadyGroup(group, 0, path, rows) for group, rows in split_groups(info.rows).items()]
        self.records += [{"k": "admitted", "group": group.group_id} for group in groups]
        self.records.append({"k": "committed", **committed_record(path, info.digest, groups)})

    def batch(self, version: int) -> list[ReadyGroup]:
        """All five groups, as the controller of attempt 2 holds them."""
        fresh = replay_ledger(self.records, 6, {"run.deterministic": True}).ready[4]
        return [*self.state.ready.values(), replace(fresh, newest_version=ALL_VERSIONS)]

    def staleness(self, version: int) -> list[list[int]]:
        """Of every trained token, as the trainer counts it."""
        manifest = make_manifest(self.batch(version), train_step=version + 1, version=version, dp=1)
        return [[version - stamp for stamp in trajectory.versions[1:].tolist()]
                for trajectory in read_batch(manifest, self.paths, RUN)]  # fmt: skip


@pytest.fixture
def resumed(tmp_path) -> Resumed:
    return Resumed(tmp_path)


def test_no_committed_answer_is_lost(resumed):
    assert sorted(resumed.state.ready) == [0, 1, 2, 3]
    assert [group.newest_version for group in resumed.state.ready.values()] == [4] * 4


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        # From version 4: back none, and 1 or 2 updates to the lost versions 5 and 6.
        (4, [[0, 0], [0, 1], [1, 2], [2, 2]]),
        (5, [[1, 1], [1, 2], [2, 3], [3, 3]]),
        # 6 has come again: two updates back to 4, and one or two to the others.
        (6, [[2, 2], [2, 3], [3, 4], [4, 4]]),
    ],
)
def test_staleness_is_counted_through_the_checkpoint(resumed, version, expected):
    found = resumed.staleness(version)
    assert found[:4] == expected
    assert found[4] == [version - 5, version - 6]  # made by today's weights
    worst = max(max(tokens) for tokens in found)
    assert describe_batch(resumed.batch(version), version)["staleness_max"] == worst
    # Interpolated proximal log-probabilities: 1 / (d + 1), and 1 only at equal weights.
    alpha = [1.0 / (max(token, 0) + 1) for tokens in found for token in tokens]
    algorithm = AlgorithmConfig(proximal="interpolate")
    size = len(alpha)
    proximal = _proximal(
        algorithm, None, torch.zeros(size), torch.ones(size), torch.tensor(found).flatten()
    )
    assert proximal.tolist() == pytest.approx(alpha)
    assert all(value < 1 for value, tokens in zip(alpha[2:8], [t for ts in expected for t in ts][2:8]) if tokens)


def test_lost_weights_are_never_compared_with_those_that_have_their_number(resumed):
    """At version 6 with the engine's log-probabilities right for its own weights and none else."""
    manifest = make_manifest(resumed.batch(6), train_step=7, version=6, dp=1)
    trajectories = read_batch(manifest, resumed.paths, RUN)
    gap = FreshGap()
    for trajectory in trajectories:
        mask = trajectory.loss_mask != 0
        own = trajectory.group_id == 4
        trainer = trajectory.rollout_logprobs if own else trajectory.rollout_logprobs + 1.0
        gap.add(mask, np.where(mask, 6 - trajectory.versions, 0), trainer, trajectory.rollout_logprobs)
    assert (gap.count, gap.largest) == (1, 0.0)
    # The trainer of attempt 2 has the weights 4, 5 and 6. Of 4 the tokens are comparable, of the others today's.
    history = WeightHistory(3, 4)
    history._snapshots = {version: [] for version in (4, 5, 6)}
    assert history.choose(trajectories, 6) == (4, [0, 1])
    del history._snapshots[4]
    assert history.choose(trajectories, 6) == (5, [4])


def test_the_arrays_are_checked_as_they_were_written(resumed):
    manifest = make_manifest(resumed.batch(6), train_step=7, version=6, dp=1)
    for row, trajectory in zip(manifest.rows, read_batch(manifest, resumed.paths, RUN), strict=True):
        assert trajectory.versions[0] == PROMPT_VERSION
        assert (row.checksum == trajectory.checksum) is (row.group_id in (0, 4))


def test_a_deterministic_run_makes_the_same_weights_again(tmp_path):
    resumed = Resumed(tmp_path, deterministic=True)
    assert resumed.staleness(6)[:4] == [[2, 2], [2, 1], [1, 0], [0, 0]]
    assert make_manifest(resumed.batch(6), train_step=7, version=6, dp=1).newest_versions == ()


def test_of_several_steps_back_the_farthest_counts():
    surviving = SurvivingVersions()
    run, shard = {"k": "run", "settings": {}}, {"k": "committed"}
    for record in ({**run, "train_step": 0}, {**shard, "path": "a"}, {**run, "train_step": 4}, {**shard, "path": "b"},
                   {**run, "train_step": 7}, {**shard, "path": "c", "newest_version": 7}):  # fmt: skip
        surviving.take(record)
    assert [surviving.newest(path) for path in "abc"] == [4, 7, 7]
    surviving.take({**run, "train_step": 6})
    assert [surviving.newest(path) for path in "abc"] == [4, 6, 6] and surviving.unannounced == 6


def test_shards_found_in_the_spool_are_of_the_attempt_before(resumed, tmp_path):
    class Journal:
        def add(self, kind: str, **fields: object) -> None:
            resumed.records.append({"k": kind, **fields})

    ShardWriter(resumed.paths.rollout_spool(2), RUN, 2).commit([answer(7, [5, 5])])
    resumed.records.append({"k": "admitted", "group": 7})
    state = replay_ledger(resumed.records, 4, resumed.settings)
    resumed.start(4)
    assert adopt_orphans(state, Journal(), resumed.paths, RUN, group_size=1, num_prompts=100) == 1
    assert state.ready[7].newest_version == 4
    assert replay_ledger(resumed.records, 6, resumed.settings).ready[7].newest_version == 4


def test_the_whole_controller_its_replay_its_report_and_its_audit(tmp_path, monkeypatch):
    quicken(monkeypatch)
    disk = Disk()
    make_run(tmp_path, crash_at=76, disk=disk, checkpoint__every=4, run__total_steps=9)
    world = make_run(tmp_path, seed=1, disk=disk, checkpoint__every=4, run__total_steps=9)
    assert [step.version for step in world.history] == list(range(9))
    # The bound holds for the numbers, which say too little from the checkpoint on.
    assert max(step.version - min(step.min_versions) for step in world.history) == 2
    assert max(max(step.staleness) for step in world.history) > 2
    steps = [json.loads(line) for line in world.paths.metrics.read_text().splitlines()]
    reported = {record["train_step"]: record["staleness_max"] for record in steps if record["kind"] == "step"}
    found = load_trained(world.paths.ledger, 9)
    records = list(read_ledger(world.paths.ledger))
    for number, step in enumerate(world.history, 1):
        assert min(step.staleness) >= 0
        assert found.steps[number].staleness == {
            value: step.staleness.count(value) for value in step.staleness
        }
        assert reported[number] == max(step.staleness)
    for replayed in read_history(records, 9).steps:
        manifest = make_manifest(list(replayed.groups), train_step=replayed.train_step, version=replayed.version,
                                 dp=1)  # fmt: skip
        assert manifest == world.history[replayed.train_step - 1].manifest
    result = audit(world.paths)
    assert not result.problems and result.counts["lost versions"] > 0
