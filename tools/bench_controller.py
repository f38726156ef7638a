"""Cost of the real controller: fake rollout and trainer ranks around it, in one process.

    python tools/bench_controller.py [--quick] [--json FILE]

The fakes answer at once and their time is taken out: what is measured is what one core of
the controller's node has to do: decode, decide, journal with fsync, encode. Keys:
trajectories_per_s: wall time, 8 rollout ranks, 1,000 prompts in flight;
cost_ratio_256_over_8, cost_ratio_100k_over_1k: CPU time of a trajectory with more ranks and
with more prompts in flight (the disk's time is the same and would only add noise).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.config.schema import Config, GroupConfig
from areal_hpc.controller import loop, progress
from areal_hpc.messages import (
    CheckpointSaved,
    ConnectWeights,
    Drain,
    Drained,
    GrantLeases,
    Message,
    Publish,
    RolloutReady,
    SaveCheckpoint,
    ShardReady,
    StepDone,
    TrainBatch,
    TrainerReady,
    VersionLive,
    WeightsConnected,
    decode,
    encode,
)
from areal_hpc.mpi.channel import Channel
from areal_hpc.mpi.world import World
from areal_hpc.paths import RunPaths
from areal_hpc.stop import StopFlag
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Lease, ShardRow

GROUP_SIZE = 8
GROUPS_PER_SHARD = 16
BATCH_GROUPS = 128


@dataclass(frozen=True)
class Clock:
    """A reading: seconds of wall and CPU time, trajectories so far."""

    wall: float
    cpu: float
    trajectories: int = 0

    @staticmethod
    def read(trajectories: int = 0) -> Clock:
        return Clock(time.perf_counter(), time.thread_time(), trajectories)

    def __sub__(self, other: Clock) -> Clock:
        return Clock(self.wall - other.wall, self.cpu - other.cpu, self.trajectories - other.trajectories)


class Fakes:
    """All ranks but the controller, each with an answer at once.

    Rollout ranks keep what is granted until all prompts in flight are out; from then on,
    whenever the controller looks, ranks in turn answer their oldest leases with a whole
    shard. `spent` is what the fakes took of the process's time.
    """

    def __init__(self, config: Config, num_in_flight: int) -> None:
        num_rollouts = config.groups.rollout.ranks
        self.rollout_ranks = tuple(range(2, 2 + num_rollouts))
        self.spent = Clock(0.0, 0.0)
        self.num_trajectories = 0
        self.begin: Clock | None = None
        self.spent_at_begin = self.spent
        self.train_step = 0
        self._num_in_flight = num_in_flight
        self._num_held = 0
        self._looked = False
        self._held: dict[int, deque[Lease]] = {rank: deque() for rank in self.rollout_ranks}
        self._next_rank = 0
        self._inbox: deque[tuple[int, bytes]] = deque()
        hosts = tuple(f"node{rank}" for rank in range(2 + num_rollouts))
        self.world = World("controller", 0, 0, (1,), self.rollout_ranks, hosts, Channel(self))
        self._tell(1, TrainerReady(0, 0))
        per_rank = -(-num_in_flight // num_rollouts) * GROUP_SIZE
        for index, rank in enumerate(self.rollout_ranks):
            self._tell(rank, RolloutReady(index, hosts[rank], per_rank, 0))

    # ---- the transport of the controller's channel -----------------------------------

    def send(self, dest: int, data: bytes) -> None:
        begin = Clock.read()
        self._take(dest, decode(data))
        self._spend(begin)

    def receive(self) -> tuple[int, bytes] | None:
        begin = Clock.read()
        if not self._inbox and not self._looked:
            self._answer()
        # A look ends when what was there is read; the next one finds more.
        self._looked = bool(self._inbox)
        message = self._inbox.popleft() if self._inbox else None
        self._spend(begin)
        return message

    def pending(self) -> int:
        return 0

    def _tell(self, source: int, message: Message) -> None:
        self._inbox.append((source, encode(message)))

    def _spend(self, begin: Clock) -> None:
        used = Clock.read() - begin
        self.spent = Clock(self.spent.wall + used.wall, self.spent.cpu + used.cpu)

    # ---- answers ---------------------------------------------------------------------

    def _take(self, dest: int, message: Message) -> None:
        match message:
            case GrantLeases(leases=leases):
                self._held[dest].extend(leases)
                self._num_held += len(leases)
            case ConnectWeights() if dest == 1:
                self._tell(1, WeightsConnected())
            case TrainBatch(manifest=manifest):
                self.train_step = manifest.train_step
                self._tell(1, StepDone(manifest.train_step, manifest.version + 1, {"loss": 0.1, "accuracy": 0.0}))
            case Publish(version=version):
                self._tell(1, VersionLive(version, {}))
            case SaveCheckpoint():
                self._tell(1, CheckpointSaved(message.train_step, "checkpoints/x", 0.0))
            case Drain():
                self._tell(dest, Drained(()))

    def _answer(self) -> None:
        if self.begin is None and self._num_held >= self._num_in_flight:
            self.begin, self.spent_at_begin = Clock.read(self.num_trajectories), self.spent
        if self.begin is None:
            return
        rank = self.rollout_ranks[self._next_rank % len(self.rollout_ranks)]
        self._next_rank += 1
        held = self._held[rank]
        leases = [held.popleft() for _ in range(min(GROUPS_PER_SHARD, len(held)))]
        if not leases:
            return
        self._num_held -= len(leases)
        step = self.train_step
        rows = tuple(
            ShardRow(place * GROUP_SIZE + index, lease.group_id, lease.prompt.prompt_id, index, 300 + index, 200,
                     step, step, float(index % 2), "stop", 1)
            for place, lease in enumerate(leases)
            for index in range(GROUP_SIZE)
        )  # fmt: skip
        self.num_trajectories += len(rows)
        path = f"spool/rollout-{rank:05d}/{self.num_trajectories}.h5"
        self._tell(rank, ShardReady(path, "0" * 64, tuple(lease.lease_id for lease in leases), rows))


class StopAfter(StopFlag):
    """Asks for a stop after `num_batches` in the steady state; the controller looks at it once a turn."""

    def __init__(self, fakes: Fakes, num_batches: int) -> None:
        super().__init__()
        self._fakes, self._wanted = fakes, num_batches * BATCH_GROUPS * GROUP_SIZE
        self.cost = Clock(0.0, 0.0)

    def __bool__(self) -> bool:
        fakes = self._fakes
        if fakes.begin is not None and not self.reason and fakes.num_trajectories - fakes.begin.trajectories >= self._wanted:
            total = Clock.read(fakes.num_trajectories) - fakes.begin
            self.cost = total - (fakes.spent - fakes.spent_at_begin)
            self.request("measured")
        return bool(self.reason)


def measure(*, num_rollouts: int, num_in_flight: int, num_batches: int) -> Clock:
    """What the controller takes for `num_batches` batches once all prompts in flight are out."""
    with tempfile.TemporaryDirectory(prefix="bench-controller-") as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        total = num_in_flight + (num_batches + 4) * BATCH_GROUPS
        prompts.write_text("".join(f'{{"question": "{n} + {n}", "answer": "{2 * n}"}}\n' for n in range(total)))
        config = Config()
        config.data.train.path = str(prompts)
        config.rollout.group_size = GROUP_SIZE
        config.trainer.batch_size = BATCH_GROUPS * GROUP_SIZE
        config.algorithm.max_staleness = -(-num_in_flight // BATCH_GROUPS) + 1
        config.run.total_steps = num_batches + 4 + num_in_flight // BATCH_GROUPS
        config.checkpoint.every = 0
        config.checkpoint.export_hf = False
        config.groups.rollout = GroupConfig(nodes=num_rollouts)
        paths = RunPaths(folder / "run")
        paths.create()
        fakes = Fakes(config, num_in_flight)
        stop = StopAfter(fakes, num_batches)
        loop.run(config, fakes.world, paths, Telemetry(paths.spans("controller", 0)), stop)
        assert fakes.train_step >= 0.8 * num_batches, "the fakes did not reach a steady state"
        return stop.cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches, one round")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    num_batches, rounds = (10, 1) if arguments.quick else (40, 3)
    loop.IDLE_S = 0.0
    progress.echo = lambda line: None  # type: ignore[assignment]
    measure(num_rollouts=8, num_in_flight=1000, num_batches=2)  # imports, caches
    # In turns, so that a busy moment of the machine meets all of them.
    cases = {"8x1k": (8, 1000), "8x4k": (8, 4096), "256x4k": (256, 4096), "8x100k": (8, 100_000)}
    costs: dict[str, list[Clock]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (num_rollouts, num_in_flight) in cases.items():
            cost = measure(num_rollouts=num_rollouts, num_in_flight=num_in_flight, num_batches=num_batches)
            costs[name].append(cost)
            print(
                f"{num_rollouts:>4} rollout ranks, {num_in_flight:>7,} prompts in flight: "
                f"{cost.trajectories / cost.wall:>8,.0f} trajectories/s, "
                f"{1e6 * cost.cpu / cost.trajectories:.1f} us CPU each",
                flush=True,
            )
    cpu = {name: min(cost.cpu / cost.trajectories for cost in found) for name, found in costs.items()}
    figures = {
        "trajectories_per_s": max(cost.trajectories / cost.wall for cost in costs["8x1k"]),
        "cost_ratio_256_over_8": cpu["256x4k"] / cpu["8x4k"],
        "cost_ratio_100k_over_1k": cpu["8x100k"] / cpu["8x1k"],
    }
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
