"""Parts of the rollout that need no engine: cores, seeds, shards in time, supervision, tokens."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal_hpc.config.schema import Config, RolloutConfig
from areal_hpc.paths import RunPaths
from areal_hpc.rollout.engine import EngineDied, EngineGauges, Generation
from areal_hpc.rollout.environment import derive_seed, engine_cores, engine_environment, let_engine_go_first
from areal_hpc.rollout.gauges import count_tokens_only
from areal_hpc.rollout.loop import RolloutWorker
from areal_hpc.rollout.spooler import GroupSpooler
from areal_hpc.rollout.supervisor import EngineFailures, EngineSupervisor, tail
from areal_hpc.spool.shard import ShardWriter, read_rows
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Trajectory


def make_group(group_id: int, size: int = 2, num_tokens: int = 5) -> list[Trajectory]:
    ones = np.ones(num_tokens)
    return [
        Trajectory(
            tokens=ones.astype(np.int32),
            loss_mask=ones.astype(np.uint8),
            rollout_logprobs=-ones.astype(np.float32),
            versions=ones.astype(np.int32),
            reward=0.5,
            prompt_id=group_id,
            group_id=group_id,
            sample_index=index,
            finish_reason="stop",
        )
        for index in range(size)
    ]


class TestCores:
    def test_a_bound_rank_keeps_its_cores(self):
        assert engine_cores([4, 5, 6, 7], 64, index=1, count=2, tensor_parallel=1) == "4,5,6,7"

    def test_unbound_engines_share_the_host(self):
        shares = [engine_cores(range(8), 8, index, 3, 1) for index in range(3)]
        assert shares == ["0,1", "2,3", "4,5"]

    def test_workers_of_an_engine_share_its_cores(self):
        assert engine_cores(range(8), 8, 0, 1, tensor_parallel=2) == "0,1,2,3|4,5,6,7"

    def test_fewer_cores_than_workers(self):
        assert engine_cores([3], 8, 0, 1, tensor_parallel=2) == "3|3"
        assert engine_cores([0, 1], 2, 2, 3, tensor_parallel=1) == "0,1"


def test_children_of_an_engine_survive_the_schedulers_signals(tmp_path):
    """Blocked signals pass through fork and exec; handlers that a child installs never run."""
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2): os.kill(os.getpid(), number)\n"
        "time.sleep(0.2)\n"
        "print('alive', os.environ['AREAL_ENGINE_LOG'], os.environ.get('VLLM_CPU_KVCACHE_SPACE'))\n"
    )
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "7"
    try:
        with engine_environment("0", str(tmp_path / "log"), 60.0):
            command = [sys.executable, "-c", program]
            result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    finally:
        assert os.environ.pop("VLLM_CPU_KVCACHE_SPACE") == "7"
    assert result.stdout.split() == ["alive", str(tmp_path / "log"), "None"]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_ranks_thread_yields_to_the_engine_and_the_engine_to_nobody():
    program = "import os; print(os.sched_getscheduler(0))"
    found = []

    def rank():
        let_engine_go_first()
        with engine_environment("0", os.devnull, 60.0):
            found.append(int(subprocess.check_output([sys.executable, "-c", program], text=True)))
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    assert found == [os.SCHED_OTHER, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "of that thread alone"


def test_of_vllms_statistics_the_number_of_tokens_is_kept():
    """The methods put in its place are those that vLLM has and calls."""
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import IterationStats

    names = ("_update_stats_from_output", "_update_stats_from_finished")
    assert all(inspect.isfunction(getattr(OutputProcessor, name)) for name in names)
    llm = SimpleNamespace(output_processor=OutputProcessor.__new__(OutputProcessor))
    count_tokens_only(llm)
    stats = IterationStats()
    for tokens in ([5], [6, 7]):
        llm.output_processor._update_stats_from_output(None, SimpleNamespace(new_token_ids=tokens), 1.0, stats)
    llm.output_processor._update_stats_from_output(None, SimpleNamespace(new_token_ids=[8]), 1.0, None)
    llm.output_processor._update_stats_from_finished(None, None, stats)
    assert stats.num_generation_tokens == 3 and not stats.inter_token_latencies_iter


def test_seeds_depend_on_every_part():
    seeds = {derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), ("1", "2", ""), (1, 2, 3)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2)


def test_arrays_of_an_answer_have_one_length():
    with pytest.raises(AssertionError):
        Generation(np.zeros(3, np.int32), np.zeros(2, np.float32), np.zeros(3, np.int32), "stop")


def test_a_group_waits_for_others_only_while_others_are_under_way(tmp_path):
    """shard_latency_s gathers groups into larger shards; with nothing under way it would be waiting for nobody."""
    sent, config, paths = [], Config(), RunPaths(tmp_path)
    channel = SimpleNamespace(send=lambda rank, message: sent.append(message))
    world = SimpleNamespace(channel=channel, controller_rank=0, role_rank=0)
    spooler = GroupSpooler(ShardWriter(paths.rollout_spool(0), "run", 0), shard_bytes=10**6, latency_s=3600.0)
    worker = RolloutWorker(
        world, paths, SimpleNamespace(config=config), None, None, spooler, Telemetry(paths.spans("rollout", 0))
    )

    async def look(seconds: float) -> list[tuple[int, ...]]:
        end = time.monotonic() + seconds
        while not sent and time.monotonic() < end:
            worker.commit_groups()
            await asyncio.sleep(0.005)
        return [message.lease_ids for message in sent]

    async def scenario() -> None:
        other = asyncio.create_task(asyncio.sleep(3600))
        worker._episodes[other] = None
        spooler.add(11, make_group(1), time.monotonic())
        assert await look(0.1) == []
        other.cancel()
        del worker._episodes[other]
        assert await look(30.0) == [(11,)]

    asyncio.run(scenario())


class TestSpooler:
    def commit(self, spooler: GroupSpooler, now: float, **options):
        """One look that starts a write if it is due, and one that takes it."""

        async def look():
            first = spooler.commit_due(now, **options)
            while spooler._writing is not None and not spooler._writing.done():
                await asyncio.sleep(0.001)
            return first or spooler.commit_due(now)

        return asyncio.run(look())

    def make(self, tmp_path: Path, **options) -> GroupSpooler:
        writer = ShardWriter(tmp_path, "run", 0)
        return GroupSpooler(writer, **{"shard_bytes": 10_000, "latency_s": 1.0, **options})

    def test_waits_for_size_or_time(self, tmp_path):
        spooler = self.make(tmp_path)
        spooler.add(11, make_group(1), now=0.0)
        assert self.commit(spooler, 0.9) is None and not spooler.empty
        spooler.add(12, make_group(2), now=0.9)
        shard = self.commit(spooler, 1.0)
        assert shard.lease_ids == (11, 12) and spooler.empty
        assert [row.group_id for row in read_rows(shard.info.path)] == [1, 1, 2, 2]
        spooler.add(13, make_group(3, num_tokens=1000), now=5.0)
        assert self.commit(spooler, 5.0).lease_ids == (13,)

    def test_a_drain_does_not_wait(self, tmp_path):
        spooler = self.make(tmp_path)
        spooler.add(11, make_group(1), now=0.0)
        assert self.commit(spooler, 0.0, flush=True).lease_ids == (11,)

    def test_a_failed_write_is_raised(self, tmp_path):
        spooler = self.make(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        spooler.add(11, make_group(1), now=0.0)
        with pytest.raises(FileNotFoundError):
            self.commit(spooler, 9.0)


class FakeEngine:
    """As much of an engine as the supervisor sees."""

    def __init__(self) -> None:
        self.alive = True
        self.died = False
        self.gauges = EngineGauges()
        self.num_in_flight = 0
        self.num_starts = 0
        self.fail_starts = 0

    async def start(self) -> None:
        self.num_starts += 1
        if self.fail_starts:
            self.fail_starts -= 1
            raise EngineDied("no memory")
        self.alive = True
        self.gauges.last_progress = time.monotonic()

    def kill(self) -> None:
        self.alive = False


class FakeUpdates:
    in_progress = False
    version = 3

    def __init__(self) -> None:
        self.events: list[str] = []

    async def restore(self) -> None:
        self.events.append("restore")

    def engine_lost(self) -> None:
        self.events.append("lost")


class TestSupervisor:
    def run(self, scenario, tmp_path: Path, **options) -> None:
        config = RolloutConfig(**{"hang_deadline_s": 5.0, **options})
        (tmp_path / "engine.log").write_text("first line\nlast words\n")

        async def act() -> None:
            engine, updates = FakeEngine(), FakeUpdates()
            supervisor = EngineSupervisor(config, engine, updates, tmp_path / "engine.log")
            await supervisor.start()
            await scenario(supervisor, engine, updates)

        asyncio.run(act())

    async def settle(self, supervisor: EngineSupervisor) -> str:
        for _ in range(1000):
            supervisor._next_look = 0.0
            if cause := supervisor.watch():
                return cause
            await asyncio.sleep(0)
        raise TimeoutError

    def test_a_dead_engine_comes_back_with_its_weights(self, tmp_path):
        async def scenario(supervisor, engine, updates):
            engine.alive = False
            supervisor.watch()
            assert not supervisor.ready.is_set()
            assert await self.settle(supervisor) == "its process died"
            assert supervisor.ready.is_set() and engine.num_starts == 2
            assert updates.events == ["restore", "lost", "restore"]

        self.run(scenario, tmp_path)

    def test_silence_counts_only_while_somebody_waits(self, tmp_path):
        async def scenario(supervisor, engine, updates):
            engine.gauges.last_progress -= 6.0
            supervisor.watch()
            assert engine.num_starts == 1
            engine.num_in_flight = 2
            updates.in_progress = True
            supervisor._next_look = 0.0
            supervisor.watch()
            assert engine.num_starts == 1 and supervisor.ready.is_set()
            updates.in_progress = False
            assert "no token for 6 s with 2 requests" in await self.settle(supervisor)

        self.run(scenario, tmp_path)

    def test_failed_restarts_count_and_end_the_run(self, tmp_path):
        async def scenario(supervisor, engine, updates):
            engine.alive = False
            engine.fail_starts = 1
            assert "no memory" in await self.settle(supervisor)
            engine.alive = False
            with pytest.raises(EngineFailures, match="failed 3 times(.*\n)*.*last words"):
                await self.settle(supervisor)

        self.run(scenario, tmp_path)

    def test_old_failures_are_forgiven(self, tmp_path):
        async def scenario(supervisor, engine, updates):
            for _ in range(4):
                engine.alive = False
                await self.settle(supervisor)
                await asyncio.sleep(0.03)

        self.run(scenario, tmp_path, failure_window_s=0.02, max_engine_failures=2)

    def test_a_first_start_that_fails_says_why(self, tmp_path):
        engine = FakeEngine()
        engine.fail_starts = 1
        (tmp_path / "engine.log").write_text("not enough memory for the cache\n")
        supervisor = EngineSupervisor(RolloutConfig(), engine, FakeUpdates(), tmp_path / "engine.log")
        with pytest.raises(EngineFailures, match="no memory(.*\n)*not enough memory for the cache"):
            asyncio.run(supervisor.start())


def test_tail_of_a_long_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {number} " + "x" * 90 for number in range(5000)))
    lines = tail(log).splitlines()
    assert len(lines) == 20 and lines[-1].startswith("line 4999 ")
    assert tail(tmp_path / "none") == ""


def test_every_engine_of_a_run_has_a_seed_of_its_own():
    from areal_hpc.rollout.engine import engine_arguments

    config = Config()
    config.model.path = config.model.tokenizer = "model"
    seeds = {engine_arguments(config, index)["seed"] for index in range(16)}
    assert len(seeds) == 16
    config.rollout.engine_options = {"block_size": 64, "dtype": "auto"}
    arguments = engine_arguments(config, 0)
    assert arguments["block_size"] == 64 and arguments["dtype"] == "auto"
