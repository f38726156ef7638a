"""The staleness bound: how many trajectories may be under way (paper, Eq. 3).

With B trajectories consumed per step, N_r ever admitted and i the version that the
engines serve, admission needs floor((N_r - 1)/B) <= i + eta, that is
N_r <= (i + eta + 1) * B. Since i steps have consumed i batches, N_r = i * B + outstanding,
and the rule is outstanding <= (eta + 1) * B whatever i is. Counting what is outstanding
instead of N_r itself keeps the rule exact when places are given back and when an epoch
ends with a short batch (which takes a whole step: its missing places count as taken).
"""

from __future__ import annotations

from collections import Counter


class StalenessBudget:
    """Places for trajectories, by epoch. Pure; restored by admitting again what is outstanding."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self._batch_size = batch_size
        self._limit = (max_staleness + 1) * batch_size
        self._outstanding: Counter[int] = Counter()
        self._closed: set[int] = set()

    @property
    def outstanding(self) -> int:
        """Trajectories admitted and neither consumed by a live version nor given back."""
        return self._outstanding.total()

    @property
    def taken(self) -> int:
        """Places taken: outstanding ones, closed epochs rounded up to whole batches."""
        return sum(
            -(-count // self._batch_size) * self._batch_size if epoch in self._closed else count
            for epoch, count in self._outstanding.items()
        )

    @property
    def capacity(self) -> int:
        """Trajectories that may be admitted now."""
        return max(0, self._limit - self.taken)

    def admit(self, epoch: int, num: int) -> None:
        """Take `num` places. The caller has looked at `capacity`."""
        assert num <= self.capacity, "admitted past the staleness bound"
        self.restore(epoch, num)

    def restore(self, epoch: int, num: int) -> None:
        """Take places without asking: what a resumed run finds under way."""
        self._outstanding[epoch] += num

    def release(self, epoch: int, num: int) -> None:
        """Give places back: consumed and live, or failed, dropped or discarded."""
        self._outstanding[epoch] -= num
        assert self._outstanding[epoch] >= 0, "released more places than were taken"
        if not self._outstanding[epoch]:
            del self._outstanding[epoch]

    def close_epoch(self, epoch: int) -> None:
        """All prompts of the epoch are admitted: its last batch may be short."""
        self._closed.add(epoch)
