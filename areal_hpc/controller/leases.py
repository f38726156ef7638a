"""Who answers what, until when. Pure: time is an argument.

A group is under way from its first grant until its first result is accepted or it is
dropped; in between it may be granted several times (expired, engine lost, rank failed).
A result is accepted for a group under way, whichever of its leases it answers, and
refused otherwise: that is how a late duplicate ends.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field

from areal_hpc.types import Lease, Prompt, SamplingSpec


@dataclass
class UnderWay:
    """One group between its admission and its result."""

    group_id: int
    epoch: int
    prompt: Prompt
    first_version: int
    """Version served when it was first granted: none of its tokens is older."""
    attempts: int = 0
    lease_id: int = -1
    rank: int = -1
    failed_on: list[int] = field(default_factory=list)


class LeaseBook:
    """All groups under way and those waiting to be granted again."""

    def __init__(self, *, group_size: int, sampling: SamplingSpec, deadline_s: float, max_attempts: int) -> None:
        self._group_size = group_size
        self._sampling = sampling
        self._deadline_s = deadline_s
        self._max_attempts = max_attempts
        self._groups: dict[int, UnderWay] = {}
        self._group_of: dict[int, int] = {}
        self._expiry: list[tuple[float, int]] = []
        self._again: deque[int] = deque()
        self._next_lease_id = 0
        self._load: Counter[int] = Counter()
        self._per_epoch: Counter[int] = Counter()
        self._per_version: Counter[int] = Counter()
        self._versions: list[int] = []
        self.num_expired = 0
        self.num_duplicates = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def waiting(self) -> int:
        """Groups to be granted again."""
        return len(self._again)

    def load(self, rank: int) -> int:
        """Groups granted to a rank and not answered."""
        return self._load[rank]

    def under_way(self, epoch: int) -> int:
        """Groups of an epoch without a result yet."""
        return self._per_epoch[epoch]

    @property
    def oldest_version(self) -> int | None:
        """Smallest first_version of all groups under way."""
        while self._versions and not self._per_version[self._versions[0]]:
            del self._per_version[heapq.heappop(self._versions)]
        return self._versions[0] if self._versions else None

    def admit(self, group_id: int, epoch: int, prompt: Prompt, version: int) -> None:
        """A new group; it waits for `grant_next`."""
        assert group_id not in self._groups, f"group {group_id} is under way already"
        self._groups[group_id] = UnderWay(group_id, epoch, prompt, version)
        self._per_epoch[epoch] += 1
        self._note_version(self._groups[group_id])
        self._again.append(group_id)

    def grant_next(self, rank: int, now: float, version: int) -> Lease | None:
        """A lease of the next waiting group to `rank` while `version` is served, or None if none waits."""
        while self._again:
            group = self._groups.get(self._again.popleft())
            if group is None or group.lease_id >= 0:
                continue
            if group.attempts:
                # It starts anew: what it will bring is as fresh as the version served now.
                self._forget_version(group)
                group.first_version = version
                self._note_version(group)
            group.lease_id, group.rank = self._next_lease_id, rank
            group.attempts += 1
            self._next_lease_id += 1
            self._group_of[group.lease_id] = group.group_id
            self._load[rank] += 1
            heapq.heappush(self._expiry, (now + self._deadline_s, group.lease_id))
            return Lease(
                lease_id=group.lease_id,
                group_id=group.group_id,
                epoch=group.epoch,
                attempt=group.attempts,
                group_size=self._group_size,
                prompt=group.prompt,
                sampling=self._sampling,
            )
        return None

    def complete(self, group_id: int) -> UnderWay | None:
        """Accept a result: the group is no longer under way. None for a duplicate."""
        group = self._groups.pop(group_id, None)
        if group is None:
            self.num_duplicates += 1
            return None
        self._unlease(group)
        self._per_epoch[group.epoch] -= 1
        self._forget_version(group)
        return group

    def fail(self, lease_id: int, *, retry: bool) -> UnderWay | None:
        """A lease came to nothing: grant the group again, or return it dropped.

        Returns None if the group waits to be granted again or the lease is no longer the
        group's; the group if it is dropped (no retry, or max_attempts reached).
        """
        group = self._groups.get(self._group_of.get(lease_id, -1))
        if group is None or group.lease_id != lease_id:
            return None
        group.failed_on.append(group.rank)
        self._unlease(group)
        if retry and group.attempts < self._max_attempts:
            self._again.appendleft(group.group_id)
            return None
        return self.complete(group.group_id)

    def expire(self, now: float) -> list[UnderWay]:
        """Let overdue leases be granted again; returns the groups that are dropped instead."""
        dropped = []
        while self._expiry and self._expiry[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiry)
            if lease_id in self._group_of:
                self.num_expired += 1
                group = self.fail(lease_id, retry=True)
                if group is not None:
                    dropped.append(group)
        return dropped

    def _note_version(self, group: UnderWay) -> None:
        if group.first_version not in self._per_version:
            heapq.heappush(self._versions, group.first_version)
        self._per_version[group.first_version] += 1

    def _forget_version(self, group: UnderWay) -> None:
        self._per_version[group.first_version] -= 1

    def _unlease(self, group: UnderWay) -> None:
        if group.lease_id >= 0:
            del self._group_of[group.lease_id]
            self._load[group.rank] -= 1
            group.lease_id = group.rank = -1
