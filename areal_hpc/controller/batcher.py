"""Finished groups and the training batches made of them. Pure.

Oldest first (by the version of the oldest token, then by arrival), whole groups, every
sample once; a batch holds groups of one epoch, and an epoch's last batch may be short.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from areal_hpc.types import BatchManifest, ManifestRow, ShardRow

NEVER_OLD = 2**31 - 1


@dataclass(frozen=True)
class ReadyGroup:
    """A committed group: rows `rows` of the shard at `path` (relative to the run folder)."""

    group_id: int
    epoch: int
    path: str
    rows: tuple[ShardRow, ...]

    @property
    def min_version(self) -> int:
        """Version of the oldest trained token; a group without trained tokens is never too old."""
        return min((row.min_version for row in self.rows if row.num_loss_tokens), default=NEVER_OLD)

    @property
    def rewards(self) -> list[float]:
        return [row.reward for row in self.rows]


class Batcher:
    """Groups that wait to be trained."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[int, int, ReadyGroup]]] = {}
        self._trajectories: dict[int, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Ready groups."""
        return sum(map(len, self._heaps.values()))

    @property
    def epochs(self) -> list[int]:
        """Epochs with ready groups, in order."""
        return sorted(self._heaps)

    def num_trajectories(self, epoch: int) -> int:
        return self._trajectories.get(epoch, 0)

    def add(self, group: ReadyGroup) -> None:
        heapq.heappush(self._heaps.setdefault(group.epoch, []), (group.min_version, self._arrivals, group))
        self._arrivals += 1
        self._trajectories[group.epoch] = self.num_trajectories(group.epoch) + len(group.rows)

    def discard_older(self, version: int) -> list[ReadyGroup]:
        """Take out the groups whose oldest token is older than `version`: they may no longer be trained."""
        gone = []
        for epoch in self.epochs:
            while epoch in self._heaps and self._heaps[epoch][0][0] < version:
                gone.append(self._pop(epoch))
        return gone

    def take(self, epoch: int, num_trajectories: int) -> list[ReadyGroup]:
        """The oldest groups of an epoch, up to `num_trajectories`; fewer if there are not so many."""
        taken: list[ReadyGroup] = []
        count = 0
        while epoch in self._heaps:
            size = len(self._heaps[epoch][0][2].rows)
            if taken and count + size > num_trajectories:
                break
            taken.append(self._pop(epoch))
            count += size
        return taken

    def _pop(self, epoch: int) -> ReadyGroup:
        group = heapq.heappop(self._heaps[epoch])[2]
        self._trajectories[epoch] -= len(group.rows)
        if not self._heaps[epoch]:
            del self._heaps[epoch], self._trajectories[epoch]
        return group


def make_manifest(groups: list[ReadyGroup], *, train_step: int, version: int, dp: int) -> BatchManifest:
    """The batch of these groups, its rows dealt to `dp` ranks with nearly equal token counts.

    Rows go longest first to the rank with the fewest tokens; every row goes to one rank.
    """
    shards = {path: index for index, path in enumerate(dict.fromkeys(group.path for group in groups))}
    rows = [
        ManifestRow(shards[group.path], row.row, row.group_id, row.sample_index, row.num_tokens)
        for group in groups
        for row in group.rows
    ]
    loads = [(0, rank) for rank in range(dp)]
    shares: list[list[int]] = [[] for _ in range(dp)]
    for index in sorted(range(len(rows)), key=lambda index: (-rows[index].num_tokens, index)):
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (tokens + rows[index].num_tokens, rank))
    return BatchManifest(
        train_step=train_step,
        version=version,
        epoch=groups[0].epoch,
        shards=tuple(shards),
        rows=tuple(rows),
        dp_rows=tuple(tuple(share) for share in shares),
    )
