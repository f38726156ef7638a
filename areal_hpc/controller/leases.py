"""Who answers what, until when. Pure: time is an argument.

A group is under way from its admission until its first result is accepted or it is
dropped; in between it may be granted several times (expired, engine lost, rank failed).
A result is accepted for a group under way, whichever of its leases it answers, and
refused otherwise: that is how a late duplicate ends.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from areal_hpc.controller.batcher import ReadyGroup
from areal_hpc.types import Begun, Lease, Prompt, SamplingSpec


@dataclass
class UnderWay:
    """One group between its admission and its result."""

    group_id: int
    epoch: int
    prompt: Prompt
    first_version: int
    """Version served when it was last granted, or of the oldest token that it was granted with: none
    of its tokens is older."""
    attempts: int = 0
    lease_id: int = -1
    rank: int = -1
    failed_on: set[int] = field(default_factory=set)
    begun: ReadyGroup | None = None
    """Unfinished answers that an earlier attempt of the run left."""


class RankLoads:
    """How many groups each rank holds, and which has room; the emptiest first.

    A heap with one entry per change: an entry that does not show the rank's present load
    is passed over, so that no step looks at every rank.
    """

    def __init__(self, room: Mapping[int, int]) -> None:
        """`room`: groups that each rank may hold."""
        self._room = dict(room)
        self._load = dict.fromkeys(room, 0)
        self._heap: list[tuple[float, int, int]] = []
        self._rebuild()

    def load(self, rank: int) -> int:
        return self._load[rank]

    def change(self, rank: int, by: int) -> None:
        self._load[rank] += by
        if self._load[rank] < self._room[rank]:
            heapq.heappush(self._heap, self._entry(rank))
            if len(self._heap) > 8 * len(self._load) + 64:
                self._rebuild()

    def emptiest(self, avoid: Collection[int] = ()) -> int | None:
        """The rank with the most room, one of `avoid` only if no other has room; None if none has."""
        passed: list[tuple[float, int, int]] = []
        found = None
        while self._heap:
            entry = self._heap[0]
            _, load, rank = entry
            if load != self._load[rank]:
                heapq.heappop(self._heap)
            elif rank in avoid:
                passed.append(heapq.heappop(self._heap))
            else:
                found = rank
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return passed[0][2] if found is None and passed else found

    def _entry(self, rank: int) -> tuple[float, int, int]:
        return self._load[rank] / self._room[rank], self._load[rank], rank

    def _rebuild(self) -> None:
        self._heap = [self._entry(rank) for rank in self._load if self._load[rank] < self._room[rank]]
        heapq.heapify(self._heap)


class LeaseBook:
    """All groups under way, granted or waiting to be."""

    def __init__(
        self,
        *,
        room: Mapping[int, int],
        group_size: int,
        sampling: SamplingSpec,
        deadline_s: float,
        max_attempts: int,
        max_staleness: int = 0,
    ) -> None:
        """`room`: groups that each rank may hold at once."""
        self.loads = RankLoads(room)
        self._group_size = group_size
        self._sampling = sampling
        self._deadline_s = deadline_s
        self._max_attempts = max_attempts
        self._max_staleness = max_staleness
        self._groups: dict[int, UnderWay] = {}
        self._group_of: dict[int, int] = {}
        self._expiry: list[tuple[float, int]] = []
        self._waiting: deque[int] = deque()
        self._next_lease_id = 0
        self._per_epoch: Counter[int] = Counter()
        self._per_class: Counter[tuple[int, int]] = Counter()
        self.num_expired = 0
        self.num_duplicates = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        """Groups under way that no rank holds."""
        return len(self._groups) - len(self._group_of)

    def under_way(self, epoch: int) -> int:
        """Groups of an epoch without a result yet."""
        return self._per_epoch[epoch]

    def classes(self) -> Iterator[tuple[int, int, int]]:
        """(epoch, first_version, groups under way): few entries, whatever the number of groups."""
        for (epoch, version), count in self._per_class.items():
            yield epoch, version, count

    def holders(self) -> set[int]:
        """Ranks that owe a result. Looks at every group: for messages only."""
        return {group.rank for group in self._groups.values() if group.rank >= 0}

    def __contains__(self, group_id: int) -> bool:
        """Whether the group is under way."""
        return group_id in self._groups

    def admit(
        self, group_id: int, epoch: int, prompt: Prompt, version: int, begun: ReadyGroup | None = None
    ) -> None:
        """A new group; it waits for `grant_next`. `begun`: what an earlier attempt left of it."""
        assert group_id not in self._groups, f"group {group_id} is under way already"
        group = UnderWay(group_id, epoch, prompt, version, begun=begun)
        self._groups[group_id] = group
        self._count(group, 1)
        self._waiting.append(group_id)

    def grant_next(self, now: float, version: int, train_version: int | None = None) -> tuple[int, Lease] | None:
        """(rank, lease) for the next waiting group while `version` is served.

        train_version: the version that the next batch is trained from, if that is another one.
        Unfinished answers are granted with it as far as such a batch may still hold them.

        None if no group waits or no rank has room. A group that failed somewhere goes to
        another rank if one has room.
        """
        while self._waiting:
            group = self._groups.get(self._waiting[0])
            if group is None or group.lease_id >= 0:
                self._waiting.popleft()  # it got its result, or was dropped, while it waited
                continue
            rank = self.loads.emptiest(group.failed_on)
            if rank is None:
                return None
            self._waiting.popleft()
            return rank, self._lease(group, rank, now, version, version if train_version is None else train_version)
        return None

    def _lease(self, group: UnderWay, rank: int, now: float, version: int, train_version: int) -> Lease:
        rows = [
            row for row in (group.begun.rows if group.begun is not None else ())
            if train_version - row.min_version <= self._max_staleness
        ]  # fmt: skip
        # It starts anew at each grant: but for these rows, what it brings is as fresh as the
        # version served now.
        self._count(group, -1)
        group.first_version = min([version, *(row.min_version for row in rows)])
        self._count(group, 1)
        group.lease_id, group.rank = self._next_lease_id, rank
        group.attempts += 1
        self._next_lease_id += 1
        self._group_of[group.lease_id] = group.group_id
        self.loads.change(rank, 1)
        heapq.heappush(self._expiry, (now + self._deadline_s, group.lease_id))
        return Lease(
            lease_id=group.lease_id,
            group_id=group.group_id,
            epoch=group.epoch,
            attempt=group.attempts,
            group_size=self._group_size,
            prompt=group.prompt,
            sampling=self._sampling,
            begun=Begun(group.begun.path, tuple(row.row for row in rows)) if group.begun and rows else None,
        )

    def complete(self, group_id: int) -> UnderWay | None:
        """Accept a result: the group is no longer under way. None for a duplicate."""
        group = self._remove(group_id)
        if group is None:
            self.num_duplicates += 1
        return group

    def fail(self, lease_id: int, *, retry: bool) -> tuple[UnderWay, bool] | None:
        """A lease came to nothing: (group, whether it is dropped), None if it is no longer the group's.

        A group that is not dropped waits to be granted again, before all others.
        """
        group = self._groups.get(self._group_of.get(lease_id, -1))
        if group is None:
            return None
        group.failed_on.add(group.rank)
        self._unlease(group)
        if retry and group.attempts < self._max_attempts:
            self._waiting.appendleft(group.group_id)
            return group, False
        self._remove(group.group_id)
        return group, True

    def expire(self, now: float) -> list[tuple[UnderWay, bool]]:
        """End overdue leases; as `fail` for each of them."""
        ended = []
        while self._expiry and self._expiry[0][0] <= now:
            outcome = self.fail(heapq.heappop(self._expiry)[1], retry=True)
            if outcome is not None:
                self.num_expired += 1
                ended.append(outcome)
        return ended

    def _remove(self, group_id: int) -> UnderWay | None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._unlease(group)
            self._count(group, -1)
        return group

    def _unlease(self, group: UnderWay) -> None:
        if group.lease_id >= 0:
            del self._group_of[group.lease_id]
            self.loads.change(group.rank, -1)
            group.lease_id = group.rank = -1

    def _count(self, group: UnderWay, by: int) -> None:
        for counter, key in ((self._per_epoch, group.epoch), (self._per_class, (group.epoch, group.first_version))):
            counter[key] += by
            if not counter[key]:
                del counter[key]
