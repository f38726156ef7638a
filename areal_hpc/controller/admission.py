"""What may be started: the next prompt, if the staleness bound and the rest of the run allow it.

Ties the prompt cursor, the staleness budget and the lease book together; owned by the
controller's loop. What a resumed run has to ask again comes before new prompts and takes
its place like them: the bound is checked at each first grant.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping

from areal_hpc.controller.batcher import ReadyGroup
from areal_hpc.controller.leases import LeaseBook
from areal_hpc.controller.ledger import Ledger
from areal_hpc.controller.prompts import NextPrompt, PromptCursor
from areal_hpc.controller.staleness import StalenessBudget
from areal_hpc.types import Lease


class Admission:
    """Admits groups of `group_size` trajectories and grants their leases."""

    def __init__(
        self,
        cursor: PromptCursor,
        budget: StalenessBudget,
        leases: LeaseBook,
        ledger: Ledger,
        group_size: int,
        *,
        ready: Iterable[ReadyGroup] = (),
        ask_again: Iterable[int] = (),
        begun: Mapping[int, ReadyGroup] | None = None,
    ) -> None:
        """`ready`: groups that a resumed run finds; `ask_again`: ids of those without a result;
        `begun`: what was saved of the answers to some of these."""
        self.cursor, self.budget, self.leases = cursor, budget, leases
        self._ledger = ledger
        self._group_size = group_size
        self._again = deque(sorted(ask_again))
        self._begun = dict(begun or {})
        self.counts: Counter[str] = Counter()
        """Unfinished answers that were gone on with, and their tokens; those that were too old for it."""
        self._again_per_epoch = Counter(cursor.at(group_id).epoch for group_id in self._again)
        for epoch in self._again_per_epoch:
            self._close_if_passed(epoch)
        for group in ready:
            budget.restore(group.epoch, len(group.rows))
            self._close_if_passed(group.epoch)

    @property
    def exhausted(self) -> bool:
        """Nothing is left to be started."""
        return self.cursor.exhausted and not self._again

    def epoch_over(self, epoch: int) -> bool:
        """Whether every prompt of the epoch has been started."""
        return self.cursor.epoch_closed(epoch) and not self._again_per_epoch[epoch]

    def may_start(self, useful: int) -> bool:
        """Whether one more group keeps the bound and `useful`, the trajectories the run can still use."""
        entry = self._next()
        if entry is None or self.budget.outstanding + self._group_size > useful:
            return False
        return self.budget.may_admit(entry.epoch, self._group_size)

    def grant(
        self, now: float, version: int, useful: int, train_version: int | None = None
    ) -> dict[int, list[Lease]]:
        """Leases for every rank with room, while groups wait or may be started; journals admissions.

        train_version: the version that the next batch is trained from, `version` if None.
        """
        grants: dict[int, list[Lease]] = defaultdict(list)
        while self.leases.loads.emptiest() is not None:
            if not self.leases.num_waiting:
                if not self.may_start(useful):
                    break
                self._start(version)
            granted = self.leases.grant_next(now, version, train_version)
            assert granted is not None, "a group waits and a rank has room"
            grants[granted[0]].append(granted[1])
            self._note_begun(granted[1], version)
        return grants

    def _note_begun(self, lease: Lease, version: int) -> None:
        """Journal and count what a lease goes on with."""
        group = self._begun.pop(lease.group_id, None)
        if group is None:
            return
        rows = lease.begun.rows if lease.begun is not None else ()
        taken = [row for row in group.rows if row.row in rows]
        self.counts["answers_continued"] += len(taken)
        self.counts["tokens_continued"] += sum(row.num_loss_tokens for row in taken)
        self.counts["answers_begun_again"] += len(group.rows) - len(taken)
        if taken:
            self._ledger.add("continued", group=lease.group_id, path=group.path, rows=list(rows), version=version)

    def _next(self) -> NextPrompt | None:
        return self.cursor.at(self._again[0]) if self._again else self.cursor.peek()

    def _start(self, version: int) -> None:
        entry = self._next()
        assert entry is not None
        if self._again:
            self._again.popleft()
            self._again_per_epoch[entry.epoch] -= 1
        else:
            self.cursor.advance()
        self.budget.admit(entry.epoch, self._group_size)
        self.leases.admit(entry.ordinal, entry.epoch, entry.prompt, version, self._begun.get(entry.ordinal))
        self._ledger.add("admitted", group=entry.ordinal, epoch=entry.epoch, version=version)
        self._close_if_passed(entry.epoch)

    def _close_if_passed(self, epoch: int) -> None:
        # Also if some of it is to be asked again: only the newest epoch counts by trajectories,
        # or several short batches could need more steps than the places that they took.
        if self.cursor.epoch_closed(epoch):
            self.budget.close_epoch(epoch)
