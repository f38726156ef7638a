"""A pool of reward processes: starts, feeds, watches, kills and replaces them.

Owns the processes, their pipes and the queue of checks; hands each verdict to a
callback. Called by `service` only, from one event loop. Processes are started afresh
(no fork of a process with MPI and vLLM threads) and without MPI's variables.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from areal_hpc.rewards.proctree import kill_tree
from areal_hpc.rewards.protocol import Batch, Check, Setup, Started, Verdict, pack, split_frames
from areal_hpc.rewards.registry import RewardError

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
"""Longest time from start to the first frame of a worker: imports over a slow shared filesystem."""
CLOSE_DEADLINE_S = 2.0
TICK_S = 0.1
DRAIN_S = 0.02
MAX_FAILED_STARTS = 3
INFLIGHT_S = 0.2
"""Work sent ahead to a worker: enough that it does not wait while the event loop is busy elsewhere, little
enough that workers end together and few checks are stuck behind a hung one."""
MIN_INFLIGHT, MAX_INFLIGHT = 2, 256
STRIPPED_PREFIXES = ("PMI_", "PMIX_", "MPI_", "MPICH_", "HYD", "OMPI_")


@dataclass
class Task:
    """A check, its wall-clock limit, and (in subclasses) what its owner needs to use the verdict."""

    check: Check
    deadline_s: float

    @property
    def wanted(self) -> bool:
        """False when nobody waits for the verdict any more."""
        return True


class _Worker(asyncio.SubprocessProtocol):
    """One process: its pipe, the tasks that it holds (in order) and since when it is at the first."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.inflight: deque[Task] = deque()
        self.head_since = time.monotonic()
        self.overdue_ticks = 0
        self.ready = False
        self.dying = ""
        self.transport: asyncio.SubprocessTransport | None = None
        self.exited = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._buffer += data
        for frame in split_frames(self._buffer):
            self.pool._received(self, frame)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)
        # Its last verdicts may still be in the pipe.
        asyncio.get_running_loop().call_later(DRAIN_S, self.pool._exited, self)

    def send(self, message: msgspec.Struct) -> None:
        pipe = self.transport.get_pipe_transport(0)
        if pipe is not None and not pipe.is_closing():
            pipe.write(pack(message))


class Pool:
    """`num_workers` processes that run checks, each bounded by its own deadline."""

    def __init__(
        self,
        setup: Setup,
        num_workers: int,
        on_verdict: Callable[[Task, Verdict], None],
        on_failure: Callable[[Task, RewardError], None],
    ) -> None:
        self.queue: deque[Task] = deque()
        self.num_kills = 0
        self.num_restarts = 0
        self._setup = setup
        self._num_workers = num_workers
        self._on_verdict = on_verdict
        self._on_failure = on_failure
        self._workers: list[_Worker] = []
        self._ids = itertools.count()
        self._mean_s = [INFLIGHT_S] * len(setup.rewards)
        self._failed_starts = 0
        self._failure: RewardError | None = None
        self._closing = False
        self._started: asyncio.Future | None = None
        self._ticker: asyncio.Task | None = None
        self._jobs: set[asyncio.Task] = set()

    def next_id(self) -> int:
        return next(self._ids)

    async def start(self) -> Started:
        """Start all workers; returns the first frame of the first one that is ready."""
        self._started = asyncio.get_running_loop().create_future()
        try:
            await asyncio.gather(*(self._spawn() for _ in range(self._num_workers)))
            self._ticker = asyncio.create_task(self._tick())
            return await asyncio.wait_for(asyncio.shield(self._started), START_DEADLINE_S)
        except TimeoutError:
            await self.close()
            raise RewardError(f"no reward worker was ready within {START_DEADLINE_S:.0f} s") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all workers: by closing their pipes, then by killing their trees."""
        self._closing = True
        if self._ticker is not None:
            self._ticker.cancel()
        self._give_up(RewardError("the reward service was closed"))
        workers, self._workers = self._workers, []
        for worker in workers:
            pipe = worker.transport.get_pipe_transport(0)
            if pipe is not None:
                pipe.close()
        idle = [worker.exited for worker in workers if not worker.inflight]
        if idle:
            await asyncio.wait(idle, timeout=CLOSE_DEADLINE_S)
        for worker in workers:
            if not worker.exited.done():
                await asyncio.to_thread(kill_tree, worker.transport.get_pid())
                await asyncio.wait([worker.exited], timeout=CLOSE_DEADLINE_S)
            worker.transport.close()
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=CLOSE_DEADLINE_S)

    def submit(self, tasks: Sequence[Task]) -> None:
        if self._failure is not None or self._closing:
            raise self._failure or RewardError("the reward service is closed")
        self.queue.extend(tasks)
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand queued checks to workers, fewest in flight first."""
        while self.queue:
            ready = [w for w in self._workers if w.ready and not w.dying]
            if not ready:
                return
            worker = min(ready, key=lambda w: len(w.inflight))
            room = self._room(worker)
            if room <= 0:
                return
            # Smaller and smaller shares, so that all workers end at the same time.
            share = max(1, len(self.queue) // (2 * len(ready)))
            tasks: list[Task] = []
            while self.queue and len(tasks) < room:
                # A group stays together while there is plenty: its gold answer is parsed once.
                plenty = len(self.queue) > 2 * room * len(ready)
                together = plenty and tasks and tasks[-1].check.prompt is self.queue[0].check.prompt
                if len(tasks) >= share and not together:
                    break
                task = self.queue.popleft()
                if task.wanted:
                    tasks.append(task)
            if not tasks:
                continue
            if not worker.inflight:
                worker.head_since = time.monotonic()
                worker.overdue_ticks = 0
            worker.inflight.extend(tasks)
            worker.send(Batch(tuple(task.check for task in tasks)))

    def _room(self, worker: _Worker) -> int:
        """How many checks `worker` may be sent now, by how long such checks take."""
        mean_s = self._mean_s[self.queue[0].check.reward]
        most = min(MAX_INFLIGHT, max(MIN_INFLIGHT, int(INFLIGHT_S / max(mean_s, 1e-6))))
        # Refill by batches, not one by one, while the worker still has work.
        room = most - len(worker.inflight)
        return room if room >= most // 2 else 0

    # ---- events of workers ---------------------------------------------------------

    def _received(self, worker: _Worker, frame: bytes) -> None:
        if not worker.ready:
            self._worker_started(worker, msgspec.msgpack.decode(frame, type=Started))
            return
        verdict = msgspec.msgpack.decode(frame, type=Verdict)
        if worker.dying or not worker.inflight or worker.inflight[0].check.check_id != verdict.check_id:
            return
        task = worker.inflight.popleft()
        worker.head_since = time.monotonic()
        worker.overdue_ticks = 0
        reward = task.check.reward
        self._mean_s[reward] += 0.05 * (verdict.seconds - self._mean_s[reward])
        self._on_verdict(task, verdict)
        self._dispatch()

    def _worker_started(self, worker: _Worker, started: Started) -> None:
        if started.error:
            worker.dying = "its rewards cannot be imported"
            self._give_up(RewardError(started.error))
            return
        worker.ready = True
        self._failed_starts = 0
        if not self._started.done():
            self._started.set_result(started)
        self._dispatch()

    def _exited(self, worker: _Worker) -> None:
        """Give the head check its verdict, put the others back, start a replacement."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        if self._closing:
            return
        code = worker.transport.get_returncode()
        if not worker.ready:
            self._failed_starts += 1
        tasks = list(worker.inflight)
        worker.inflight.clear()
        self.queue.extendleft(reversed(tasks[1:]))
        if tasks:
            seconds = time.monotonic() - worker.head_since
            problem = "timeout" if worker.dying else "crash"
            message = worker.dying or f"its worker ended with exit code {code}"
            self._on_verdict(tasks[0], Verdict(tasks[0].check.check_id, (), seconds, problem, message))
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._give_up(
                RewardError(
                    f"{MAX_FAILED_STARTS} reward workers in a row ended before they were ready "
                    f"(exit code {code}); see the log above"
                )
            )
        elif self._failure is None:
            self.num_restarts += 1
            self._spawn_in_background()

    def _give_up(self, error: RewardError) -> None:
        """No worker will ever be ready: fail everything that waits."""
        if self._failure is None:
            self._failure = error
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
            self._started.exception()
        tasks = list(self.queue) + [task for worker in self._workers for task in worker.inflight]
        self.queue.clear()
        for task in tasks:
            self._on_failure(task, error)

    async def _tick(self) -> None:
        """Kill workers whose check is over the deadline.

        A late reading of the pipe must not look like a late check (the loop may have
        been busy for seconds): the second look, after a turn of the loop, decides.
        """
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for worker in list(self._workers):
                if worker.dying or (worker.ready and not worker.inflight):
                    continue
                limit = worker.inflight[0].deadline_s if worker.ready else START_DEADLINE_S
                if now - worker.head_since < limit:
                    continue
                worker.overdue_ticks += 1
                if worker.overdue_ticks >= 2:
                    self._kill(worker, f"no verdict within {limit:.1f} s; killed with its processes")

    def _kill(self, worker: _Worker, reason: str) -> None:
        worker.dying = reason
        self.num_kills += 1
        self._in_background(asyncio.to_thread(kill_tree, worker.transport.get_pid()))

    def _spawn_in_background(self) -> None:
        self._in_background(self._spawn())

    def _in_background(self, coroutine) -> None:
        job = asyncio.ensure_future(coroutine)
        self._jobs.add(job)
        job.add_done_callback(self._job_done)

    def _job_done(self, job: asyncio.Task) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and job.exception() is not None:
            self._give_up(RewardError(f"the reward pool cannot go on: {job.exception()}"))

    async def _spawn(self) -> None:
        _, worker = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Worker(self),
            sys.executable,
            "-m",
            "areal_hpc.rewards.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env=worker_environment(),
            start_new_session=True,
        )
        self._workers.append(worker)
        worker.send(self._setup)
        if self._closing:
            await asyncio.to_thread(kill_tree, worker.transport.get_pid())


def worker_environment() -> dict[str, str]:
    """This process's environment without MPI's variables; imports resolve as they do here."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(STRIPPED_PREFIXES)
    }
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment["OMP_NUM_THREADS"] = "1"
    return environment
