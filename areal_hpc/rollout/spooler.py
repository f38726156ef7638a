"""Gathers finished groups into shards: large enough for the filesystem, soon enough for training.

Owned by the rollout's loop, which calls `commit_due` at every turn; writing happens in a
thread, one shard at a time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from areal_hpc.spool.shard import ShardInfo, ShardWriter
from areal_hpc.types import Trajectory

TOKEN_BYTES = 13
"""Bytes of one token in a shard: id, log-probability, version and mask."""


@dataclass(frozen=True)
class CommittedShard:
    info: ShardInfo
    lease_ids: tuple[int, ...]
    began: float
    """When writing began, seconds since the epoch."""
    seconds: float


class GroupSpooler:
    """Whole groups wait here until they fill a shard or have waited `latency_s`."""

    def __init__(self, writer: ShardWriter, *, shard_bytes: int, latency_s: float) -> None:
        self._writer = writer
        self._shard_bytes = shard_bytes
        self._latency_s = latency_s
        self._groups: list[tuple[int, list[Trajectory]]] = []
        self._oldest = 0.0
        self._writing: asyncio.Task[CommittedShard] | None = None

    def add(self, lease_id: int, group: list[Trajectory], now: float) -> None:
        if not self._groups:
            self._oldest = now
        self._groups.append((lease_id, group))

    @property
    def empty(self) -> bool:
        return not self._groups and self._writing is None

    def commit_due(self, now: float, *, flush: bool = False) -> CommittedShard | None:
        """Start writing if it is time (or `flush`); the shard that became whole since the last call."""
        done = None
        if self._writing is not None and self._writing.done():
            done, self._writing = self._writing.result(), None
        if self._writing is None and self._groups and (flush or self._is_due(now)):
            groups, self._groups = self._groups, []
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, groups))
        return done

    def _is_due(self, now: float) -> bool:
        size = sum(sample.num_tokens for _, group in self._groups for sample in group) * TOKEN_BYTES
        return size >= self._shard_bytes or now - self._oldest >= self._latency_s

    def _write(self, groups: list[tuple[int, list[Trajectory]]]) -> CommittedShard:
        began, clock = time.time(), time.perf_counter()
        info = self._writer.commit([sample for _, group in groups for sample in group])
        leases = tuple(lease_id for lease_id, _ in groups)
        return CommittedShard(info, leases, began, time.perf_counter() - clock)
