"""A world without MPI, engines or weights around the real controller, for fast tests.

`FakeWorld` plays all trainers and rollouts in the controller's own thread: its transport
does their work whenever the controller looks for messages, in a random order that a seed
fixes. Shards are real files; weights are the number of the step. `Crash` is thrown into the
controller at a chosen turn, which then loses its memory; what is on disk stays.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from areal_hpc.config.schema import Config, GroupConfig, Mode
from areal_hpc.controller.loop import run
from areal_hpc.messages import (
    BatchRefused,
    CheckpointSaved,
    ConnectWeights,
    Drain,
    Drained,
    EngineRestarted,
    EvalRequest,
    EvalResult,
    GrantLeases,
    LeaseFailed,
    Message,
    Publish,
    PublishFailed,
    RewardReady,
    RewardStatus,
    RolloutReady,
    RolloutStatus,
    SaveCheckpoint,
    ShardReady,
    StepDone,
    Stop,
    TrainBatch,
    TrainerReady,
    UnfinishedSaved,
    VersionLive,
    WeightsConnected,
    decode,
    encode,
)
from areal_hpc.mpi.channel import Channel
from areal_hpc.mpi.world import World
from areal_hpc.paths import RunPaths
from areal_hpc.rewards.right import describe_answers
from areal_hpc.spool.shard import ShardWriter, read_rows
from areal_hpc.stop import StopFlag
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import (
    ALL_VERSIONS,
    PROMPT_VERSION,
    BatchManifest,
    EvalSample,
    Lease,
    Trajectory,
    distinct_version,
    unfinished_run_id,
)


class Crash(BaseException):
    """The controller's process is gone."""


def make_config(folder: Path, num_prompts: int = 12, **changes: object) -> Config:
    """A small configuration over made-up prompts; `changes` maps dotted keys (with __) to values."""
    prompts = folder / "prompts.jsonl"
    lines = [f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(num_prompts)]
    prompts.write_text("".join(lines))
    held = folder / "heldout.jsonl"
    held.write_text("".join(f'{{"question": "{n}+2=", "answer": "{n + 2}"}}\n' for n in range(5)))
    config = Config()
    config.run.total_steps = 6
    config.run.stall_deadline_s = 20.0
    config.data.train.path = str(prompts)
    config.data.heldout.path = str(held)
    config.rollout.group_size = 2
    config.trainer.batch_size = 8
    config.algorithm.max_staleness = 2
    config.checkpoint.every = 2
    config.eval.batch_prompts = 2
    config.groups.rollout = GroupConfig(nodes=2)
    for key, value in changes.items():
        *parents, name = key.split("__")
        node = config
        for parent in parents:
            node = getattr(node, parent)
        assert hasattr(node, name), key
        setattr(node, name, Mode(value) if key == "run__mode" else value)
    return config


@dataclass
class Faults:
    """Probabilities of trouble per opportunity, and when the controller dies."""

    fail: float = 0.0
    unscorable: float = 0.0
    restart: float = 0.0
    duplicate: float = 0.0
    publish: float = 0.0
    unread: float = 0.0
    """A shard of the batch is damaged on disk."""
    hidden: float = 0.0
    """A shard of the batch is whole, but the trainer's node cannot see it."""
    silent: float = 0.0
    straggler: float = 0.0
    crash_at: int = -1
    stop_at: int = -1


@dataclass
class Trained:
    """What the fake trainer saw: per step, the samples as (group_id, sample_index) and their versions."""

    version: int
    samples: list[tuple[int, int]]
    min_versions: list[int]
    staleness: list[int]
    """As the real trainer counts it: lost versions kept apart."""
    manifest: BatchManifest


@dataclass
class Disk:
    """What survives a crash beside the run folder: the trainer's checkpoints by step."""

    checkpoints: dict[int, list[Trained]] = field(default_factory=lambda: {0: []})

    @property
    def newest(self) -> int:
        return max(self.checkpoints)


@dataclass
class _Working:
    lease: Lease
    started: int
    ticks: int
    begun: dict[int, Trajectory] = field(default_factory=dict)
    """Sample -> what an earlier attempt left of its answer."""


class FakeWorld:
    """All ranks but the controller."""

    def __init__(
        self, config: Config, paths: RunPaths, disk: Disk, seed: int, faults: Faults | None = None,
        capacity: int = 16,
    ) -> None:  # fmt: skip
        self.config, self.paths, self.disk = config, paths, disk
        self.faults = faults or Faults()
        self.random = random.Random(seed)
        self.stop = StopFlag()
        self.turns = 0
        self.train_step = self.version = disk.newest
        self.history: list[Trained] = list(disk.checkpoints[disk.newest])
        self.served = 0
        self.evaluations: list[tuple[int, int]] = []
        self.commands: list[Message] = []
        self.granted: list[Lease] = []
        self.stopped: set[int] = set()
        num_trainers = config.groups.trainer.ranks
        self.trainer_ranks = tuple(range(1, 1 + num_trainers))
        first_reward = 1 + num_trainers + config.groups.rollout.ranks
        size = first_reward + config.groups.reward.ranks
        self.rollout_ranks = tuple(range(1 + num_trainers, first_reward))
        self.reward_ranks = tuple(range(first_reward, size))
        self.world = World(
            "controller", 0, 0, self.trainer_ranks, self.rollout_ranks, tuple(f"node{r}" for r in range(size)),
            Channel(self), reward_ranks=self.reward_ranks,
        )  # fmt: skip
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._working: dict[int, list[_Working]] = {rank: [] for rank in self.rollout_ranks}
        self._finished: dict[int, list[tuple[Lease, list[Trajectory]]]] = {rank: [] for rank in self.rollout_ranks}
        self._writers = {
            rank: ShardWriter(paths.rollout_spool(rank - self.rollout_ranks[0]), config.run.name, rank)
            for rank in self.rollout_ranks
        }
        self._damaged: dict[Path, bytes] = {}
        self._later: deque[tuple[int, int, Message]] = deque()
        self._tell(1, TrainerReady(self.train_step, self.version))
        for index, rank in enumerate(self.rollout_ranks):
            self._tell(rank, RolloutReady(index, f"node{rank}", capacity, 0))
        for index, rank in enumerate(self.reward_ranks):
            self._tell(rank, RewardReady(index))

    def run(self) -> None:
        """The real controller, in this world."""
        self.paths.create()
        telemetry = Telemetry(self.paths.spans("controller", 0))
        try:
            run(self.config, self.world, self.paths, telemetry, self.stop)
        finally:
            telemetry.close()

    # ---- transport -----------------------------------------------------------------

    def send(self, dest: int, data: bytes) -> None:
        message = decode(data)
        if dest in self.trainer_ranks:
            self._command(dest, message)
        elif dest in self.reward_ranks:
            assert isinstance(message, Stop)
            self.stopped.add(dest)
        else:
            self._order(dest, message)

    def receive(self) -> tuple[int, bytes] | None:
        if self._inbox:
            return self._inbox.popleft()
        self.turn()
        return None

    def pending(self) -> int:
        return 0

    def _tell(self, source: int, message: Message) -> None:
        self._inbox.append((source, encode(message)))

    # ---- a turn of everybody -------------------------------------------------------

    def turn(self) -> None:
        self.turns += 1
        if self.turns == self.faults.crash_at:
            self.mend()
            raise Crash
        if self.turns == self.faults.stop_at:
            self.stop.request("walltime (test)", requeue=True)
        while self._later and self._later[0][0] <= self.turns:
            _, source, message = self._later.popleft()
            if isinstance(message, StepDone):
                self.train_step = self.version = message.train_step
            if isinstance(message, EvalRequest):
                message = self._evaluate(source, message)
            self._tell(source, message)
        for rank in self.rollout_ranks:
            self._generate(rank)
        for index, rank in enumerate(self.reward_ranks):
            if self.turns % 50 == 0:
                self._tell(rank, RewardStatus(index, {"checks": float(self.turns)}))

    def mend(self) -> None:
        """At a crash: damage that nobody knows of yet was none that lasts, or the audit would find it."""
        for path, data in self._damaged.items():
            if path.exists():
                path.write_bytes(data)

    def _evaluate(self, rank: int, request: EvalRequest) -> EvalResult:
        """Answered by the weights that serve now, not by those that served when it was asked for."""
        samples = tuple(
            EvalSample(prompt.prompt_id, k, float(self.random.randint(0, 1)), 5, "stop", self.served)
            for prompt in request.prompts
            for k in range(request.num_samples)
        )
        return EvalResult(request.eval_id, rank - self.rollout_ranks[0], samples)

    def _answer_later(self, source: int, message: Message) -> None:
        last = self._later[-1][0] if self._later else 0
        self._later.append((max(last, self.turns + self.random.randint(1, 6)), source, message))

    def _generate(self, rank: int) -> None:
        working, chance, faults = self._working[rank], self.random.random, self.faults
        if working and chance() < faults.restart:
            lost = [entry.lease.lease_id for entry in working]
            working.clear()
            self._tell(rank, EngineRestarted(rank - self.rollout_ranks[0], self.served, "test", tuple(lost)))
        for entry in list(working):
            entry.ticks -= 1
            if entry.ticks > 0:
                continue
            working.remove(entry)
            lease = entry.lease
            if chance() < faults.unscorable:
                self._tell(rank, LeaseFailed(lease.lease_id, lease.group_id, False, "gold cannot be parsed"))
            elif chance() < faults.fail:
                self._tell(rank, LeaseFailed(lease.lease_id, lease.group_id, True, "bad luck"))
            elif chance() >= faults.silent:
                self._finished[rank].append((lease, self._answers(entry)))
        if self._finished[rank] and chance() < 0.5:
            self._commit(rank)
        if self.turns % 50 == 0:
            self._tell(
                rank, RolloutStatus(rank - self.rollout_ranks[0], self.served, len(working), 0, 10 * self.turns, {})
            )

    def _commit(self, rank: int) -> None:
        done, self._finished[rank] = self._finished[rank], []
        info = self._writers[rank].commit([sample for _, group in done for sample in group])
        ids = tuple(lease.lease_id for lease, _ in done)
        ready = ShardReady(self.paths.relative(info.path), info.digest, ids, info.rows)
        self._tell(rank, ready)
        if self.random.random() < self.faults.duplicate:
            # The same groups once more, as a rank would answer whose lease had expired.
            again = self._writers[rank].commit([sample for _, group in done for sample in group])
            self._tell(rank, ShardReady(self.paths.relative(again.path), again.digest, ids, again.rows))

    def _answers(self, entry: _Working) -> list[Trajectory]:
        return [self._answer(entry, index) for index in range(entry.lease.group_size)]

    def _answer(self, entry: _Working, index: int, **changes: object) -> Trajectory:
        length = self.random.randint(2, 12)
        # An interrupted answer goes on under newer weights.
        versions = sorted(self.random.randint(entry.started, self.served) for _ in range(length))
        versions[0] = entry.started
        tokens = [self.random.randrange(1000) for _ in range(length)]
        if index in entry.begun:
            tokens = entry.begun[index].tokens[1:].tolist() + tokens
            versions = entry.begun[index].versions[1:].tolist() + versions
        lease = entry.lease
        sample = Trajectory(
            tokens=np.array([lease.prompt.prompt_id, *tokens], np.int32),
            loss_mask=np.r_[0, np.ones(len(tokens))].astype(np.uint8),
            rollout_logprobs=np.array([0, *tokens], np.float32),
            versions=np.array([PROMPT_VERSION, *versions], np.int32),
            reward=(reward := float(self.random.randint(0, 1))),
            reward_parts={"math": reward},
            prompt_id=lease.prompt.prompt_id,
            group_id=lease.group_id,
            sample_index=index,
            finish_reason="stop",
        )
        return replace(sample, **changes)

    def _keep_unfinished(self, rank: int) -> None:
        rows = [
            self._answer(entry, index, finish_reason="abort", reward_parts={"turn": 0.0})
            for entry in self._working[rank] for index in range(entry.lease.group_size) if self.random.random() < 0.8
        ]  # fmt: skip
        if rows:
            role_rank = rank - self.rollout_ranks[0]
            name = unfinished_run_id(self.config.run.name)
            info = ShardWriter(self.paths.unfinished(role_rank), name, role_rank).commit(rows)
            self._tell(rank, UnfinishedSaved(self.paths.relative(info.path), info.digest, info.rows))

    def _begun(self, lease: Lease) -> dict[int, Trajectory]:
        if lease.begun is None:
            return {}
        path = self.paths.resolve_inside(lease.begun.path)
        rows = read_rows(path, lease.begun.rows, run_id=unfinished_run_id(self.config.run.name))
        assert all(row.group_id == lease.group_id for row in rows)
        return {row.sample_index: row for row in rows}

    # ---- orders to rollouts --------------------------------------------------------

    def _order(self, rank: int, message: Message) -> None:
        match message:
            case GrantLeases(leases=leases):
                for lease in leases:
                    self.granted.append(lease)
                    ticks = self.random.randint(1, 12)
                    if self.random.random() < self.faults.straggler:
                        ticks *= 30
                    self._working[rank].append(_Working(lease, self.served, ticks, self._begun(lease)))
            case EvalRequest():
                self.evaluations.append((message.version, len(message.prompts)))
                assert message.version == self.served, "evaluated at a version that does not serve"
                self._answer_later(rank, message)
            case Drain():
                if message.keep and self._working[rank]:
                    self._keep_unfinished(rank)
                unfinished = tuple(entry.lease.lease_id for entry in self._working[rank])
                self._working[rank].clear()
                if self._finished[rank]:
                    self._commit(rank)
                self._tell(rank, Drained(unfinished))
            case Stop():
                self.stopped.add(rank)
            case ConnectWeights():
                pass
            case _:
                raise AssertionError(f"{message} to a rollout")

    # ---- commands to trainers ------------------------------------------------------

    def _command(self, rank: int, message: Message) -> None:
        if isinstance(message, Stop):
            self.stopped.add(rank)
            return
        if rank != self.trainer_ranks[0]:
            # Lockstep: every rank gets what the lead got, in the same order.
            assert encode(message) == encode(self.commands[-1])
            return
        self.commands.append(message)
        match message:
            case ConnectWeights():
                self._answer_later(1, WeightsConnected())
            case TrainBatch(manifest=manifest):
                self._train(manifest)
            case Publish(version=version):
                if self.random.random() < self.faults.publish:
                    self._answer_later(1, PublishFailed(version, "test"))
                else:
                    assert version == self.version
                    self.served = version
                    self._answer_later(1, VersionLive(version, {"total_s": 0.1}))
            case SaveCheckpoint():
                assert message.train_step == self.train_step
                self.disk.checkpoints[message.train_step] = list(self.history)
                if message.export_hf:
                    self.paths.export(message.train_step).mkdir(parents=True, exist_ok=True)
                path = self.paths.relative(self.paths.checkpoint(message.train_step))
                self._answer_later(1, CheckpointSaved(message.train_step, path, 0.1))
            case _:
                raise AssertionError(f"{message} to a trainer")

    def _train(self, manifest: BatchManifest) -> None:
        assert (manifest.train_step, manifest.version) == (self.train_step + 1, self.version)
        assert sorted(row for share in manifest.dp_rows for row in share) == list(range(len(manifest.rows)))
        if self.random.random() < self.faults.unread:
            shard = self.random.choice(manifest.shards)
            path = self.paths.resolve_inside(shard)
            self._damaged[path] = path.read_bytes()
            path.write_bytes(bytes(path.stat().st_size))
            self._answer_later(1, BatchRefused(manifest.train_step, {shard: "zero-filled"}))
            return
        if self.faults.hidden and self.random.random() < self.faults.hidden:
            shard = self.random.choice(manifest.shards)
            self._answer_later(1, BatchRefused(manifest.train_step, {shard: "it is missing"}))
            return
        samples, min_versions, staleness, answers = [], [], [], []
        for row in manifest.rows:
            path = self.paths.resolve_inside(manifest.shards[row.shard])
            (sample,) = read_rows(path, [row.row], run_id=self.config.run.name)
            assert (sample.group_id, sample.sample_index, sample.num_tokens) == (
                row.group_id, row.sample_index, row.num_tokens,
            )
            samples.append((sample.group_id, sample.sample_index))
            min_versions.append(sample.min_version)
            newest = manifest.newest_versions[row.shard] if manifest.newest_versions else ALL_VERSIONS
            stamps = [distinct_version(version, newest) for version in sample.versions[1:].tolist()]
            staleness.append(manifest.version - min(stamps))
            answers.append((sample.reward, sample.reward_parts))
        self.history.append(Trained(manifest.version, samples, min_versions, staleness, manifest))
        metrics = {"loss": 0.5, "tokens_per_s": 9.0, **describe_answers(self.config.rewards, answers)}
        self._answer_later(1, StepDone(manifest.train_step, manifest.version + 1, metrics))
