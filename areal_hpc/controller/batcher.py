"""Finished groups and the training batches made of them. Pure.

Oldest first (by the version of the oldest token, then by arrival), whole groups, every
sample once; a batch holds groups of one epoch, and an epoch's last batch may be short.
`choose_epoch` says whether a batch may be formed now: not if that would leave a group
that could then no longer be trained within the staleness bound. A straggler is waited
for rather than thrown away.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from areal_hpc.types import ALL_VERSIONS, BatchManifest, ManifestRow, ShardRow

NEVER_OLD = 2**31 - 1


@dataclass(frozen=True)
class ReadyGroup:
    """A committed group: rows `rows` of the shard at `path` (relative to the run folder).

    newest_version: the newest version in it that is still what it was when these answers
    were made; later ones were lost and given again to other weights (`surviving`).
    """

    group_id: int
    epoch: int
    path: str
    rows: tuple[ShardRow, ...]
    newest_version: int = ALL_VERSIONS

    @property
    def min_version(self) -> int:
        """Version of the oldest trained token; a group without trained tokens is never too old.

        As stamped: what was committed is trained within its bound even if its version was lost.
        """
        return min((row.min_version for row in self.rows if row.num_loss_tokens), default=NEVER_OLD)

    @property
    def rewards(self) -> list[float]:
        return [row.reward for row in self.rows]


def split_groups(rows: Iterable[ShardRow]) -> dict[int, tuple[ShardRow, ...]]:
    """The rows of each group of a shard. Of a group answered twice (its lease had expired) the first answers."""
    groups: dict[int, dict[int, ShardRow]] = {}
    for row in rows:
        groups.setdefault(row.group_id, {}).setdefault(row.sample_index, row)
    # By sample, whatever order a workflow returned them in.
    return {
        group_id: tuple(row for _, row in sorted(members.items())) for group_id, members in groups.items()
    }


class Batcher:
    """Groups that wait to be trained."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[int, int, ReadyGroup]]] = {}
        self._per_epoch: Counter[int] = Counter()
        self._per_class: Counter[tuple[int, int]] = Counter()
        self._arrivals = 0

    def __len__(self) -> int:
        """Ready groups."""
        return sum(map(len, self._heaps.values()))

    @property
    def epochs(self) -> list[int]:
        """Epochs with ready groups, in order."""
        return sorted(self._heaps)

    def num_trajectories(self, epoch: int) -> int:
        return self._per_epoch[epoch]

    def classes(self) -> Iterator[tuple[int, int, int]]:
        """(epoch, min_version, ready trajectories): few entries, whatever the number of groups."""
        for (epoch, version), count in self._per_class.items():
            yield epoch, version, count

    def oldest(self, epoch: int) -> int:
        return self._heaps[epoch][0][0]

    def add(self, group: ReadyGroup) -> None:
        heapq.heappush(self._heaps.setdefault(group.epoch, []), (group.min_version, self._arrivals, group))
        self._arrivals += 1
        self._count(group, len(group.rows))

    def discard_older(self, version: int) -> list[ReadyGroup]:
        """Take out the groups whose oldest token is older than `version`: they may no longer be trained."""
        gone = []
        for epoch in self.epochs:
            while epoch in self._heaps and self.oldest(epoch) < version:
                gone.append(self._pop(epoch))
        return gone

    def take(self, epoch: int, num_trajectories: int) -> list[ReadyGroup]:
        """The oldest groups of an epoch, up to `num_trajectories`, in order of their admission."""
        taken: list[ReadyGroup] = []
        count = 0
        while epoch in self._heaps:
            size = len(self._heaps[epoch][0][2].rows)
            if taken and count + size > num_trajectories:
                break
            taken.append(self._pop(epoch))
            count += size
        # The same groups make the same batch, whoever finished first.
        return sorted(taken, key=lambda group: group.group_id)

    def remove_shard(self, path: str) -> list[ReadyGroup]:
        """Take out every group that lies in a shard (which turned out to be damaged)."""
        removed = []
        for epoch in self.epochs:
            kept = [entry for entry in self._heaps[epoch] if entry[2].path != path]
            removed += [entry[2] for entry in self._heaps[epoch] if entry[2].path == path]
            heapq.heapify(kept)
            self._heaps[epoch] = kept
            if not kept:
                del self._heaps[epoch]
        for group in removed:
            self._count(group, -len(group.rows))
        return removed

    def _pop(self, epoch: int) -> ReadyGroup:
        group = heapq.heappop(self._heaps[epoch])[2]
        self._count(group, -len(group.rows))
        if not self._heaps[epoch]:
            del self._heaps[epoch]
        return group

    def _count(self, group: ReadyGroup, by: int) -> None:
        key = (group.epoch, group.min_version)
        self._per_epoch[group.epoch] += by
        self._per_class[key] += by
        if not self._per_class[key]:
            del self._per_class[key]


@dataclass(frozen=True)
class Choice:
    """`epoch` to make a batch of, None for none; `held_for` is the version whose stragglers are awaited."""

    epoch: int | None
    held_for: int | None = None


def choose_epoch(
    batcher: Batcher,
    under_way: Iterable[tuple[int, int, int]],
    *,
    is_complete: Callable[[int], bool],
    version: int,
    eta: int,
    batch_size: int,
) -> Choice:
    """Which epoch the next batch, trained from `version`, may be made of.

    under_way: (epoch, first version, trajectories) of what has no result yet. is_complete:
    whether no more trajectories of an epoch will come, so that a short batch may be made.

    With deadlines: a group whose oldest token is of version m must be in one of the batches
    trained from versions up to m + eta. After this batch those are m + eta - version of
    them, so no more than that many batches may be needed by the groups of versions up to
    m. The admission rule (Eq. 3) makes sure that this can be kept.
    """
    ripe = [
        epoch
        for epoch in batcher.epochs
        if batcher.num_trajectories(epoch) >= batch_size or is_complete(epoch)
    ]
    if not ripe:
        return Choice(None)
    chosen = min(ripe, key=lambda epoch: (batcher.oldest(epoch), epoch))
    # What can no longer be trained in time is not worth waiting for.
    waiting = [entry for entry in under_way if entry[1] + eta >= version]
    if not waiting:
        return Choice(chosen)
    places = min(batch_size, batcher.num_trajectories(chosen))
    entries = [(oldest, epoch, count, epoch == chosen) for epoch, oldest, count in batcher.classes()]
    entries += [(oldest, epoch, count, False) for epoch, oldest, count in waiting]
    in_batch = num_batches = 0
    needed: Counter[int] = Counter()
    for bound, members in itertools.groupby(sorted(entries), key=lambda entry: entry[0]):
        assert bound + eta >= version, "too old groups were not discarded"
        for _, epoch, count, may_be_in_batch in members:
            if may_be_in_batch:
                in_batch += count
            else:
                num_batches -= -(-needed[epoch] // batch_size)
                needed[epoch] += count
                num_batches += -(-needed[epoch] // batch_size)
        if in_batch >= places:
            break  # nothing younger is in the batch: waiting would not change it
        if num_batches > bound + eta - version:
            return Choice(None, held_for=bound)
    return Choice(chosen)


def make_manifest(groups: list[ReadyGroup], *, train_step: int, version: int, dp: int) -> BatchManifest:
    """The batch of these groups, its rows dealt to `dp` ranks with nearly equal token counts.

    Rows go longest first to the rank with the fewest tokens; every row goes to one rank.
    """
    shards = {path: index for index, path in enumerate(dict.fromkeys(group.path for group in groups))}
    newest = {group.path: group.newest_version for group in groups}
    rows = [
        ManifestRow(
            shards[group.path], row.row, row.group_id, row.sample_index, row.num_tokens, row.checksum
        )
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
        newest_versions=() if set(newest.values()) == {ALL_VERSIONS} else tuple(newest[path] for path in shards),
    )
