"""The staleness bound: how many trajectories may be under way (paper, Eq. 3).

With B trajectories consumed per step, N_r ever admitted and i the version that the
engines serve, admission needs floor((N_r - 1)/B) <= i + eta, that is
N_r <= (i + eta + 1) * B. Since i steps have consumed i batches, N_r = i * B + outstanding,
and the rule is outstanding <= (eta + 1) * B whatever i is. Counting what is outstanding
instead of N_r itself keeps the rule exact when places are given back, when an epoch ends
with a short batch (which takes a whole step: its missing places count as taken) and when
a run goes back to an earlier checkpoint (i and N_r fall together).
"""

from __future__ import annotations

from collections import Counter


class StalenessBudget:
    """Places for trajectories, by epoch. Pure; restored by `restore` of what is outstanding."""

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
        return sum(self._places(epoch, count) for epoch, count in self._outstanding.items())

    def may_admit(self, epoch: int, num: int) -> bool:
        """Whether `num` more trajectories of `epoch` keep the bound."""
        count = self._outstanding[epoch]
        growth = self._places(epoch, count + num) - self._places(epoch, count)
        return self.taken + growth <= self._limit

    def _places(self, epoch: int, count: int) -> int:
        return -(-count // self._batch_size) * self._batch_size if epoch in self._closed else count

    def admit(self, epoch: int, num: int) -> None:
        """Take `num` places. The caller has asked `may_admit`."""
        assert self.may_admit(epoch, num), "admitted past the staleness bound"
        self.restore(epoch, num)

    def restore(self, epoch: int, num: int) -> None:
        """Take places without asking: what a resumed run finds committed."""
        self._outstanding[epoch] += num

    def release(self, epoch: int, num: int) -> None:
        """Give places back: consumed and live, or failed, dropped or discarded."""
        self._outstanding[epoch] -= num
        assert self._outstanding[epoch] >= 0, "released more places than were taken"
        if not self._outstanding[epoch]:
            del self._outstanding[epoch]

    def close_epoch(self, epoch: int) -> None:
        """The epoch's last prompt was reached: its last batch may be short."""
        self._closed.add(epoch)
