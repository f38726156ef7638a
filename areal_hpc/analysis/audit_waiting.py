"""Part of the audit: committed groups that wait although the run went past them.

A group that the controller forgot is in no batch and in no record of what was left out; to the
journal it waits like others. What tells them apart is the order of batches: of an epoch the
oldest groups are taken first (version of the oldest token, then arrival), and before each
batch whatever has become too old is discarded by name. Data that ends leaves nothing over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from areal_hpc.controller.batcher import NEVER_OLD
from areal_hpc.types import ShardRow


@dataclass(frozen=True)
class Committed:
    """A group as the journal has it. `arrival`: which commitment of the journal it is."""

    epoch: int
    path: str
    rows: tuple[ShardRow, ...]
    arrival: int

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def min_version(self) -> int:
        return min((row.min_version for row in self.rows if row.num_loss_tokens), default=NEVER_OLD)


@dataclass(frozen=True)
class Batch:
    """A batch as it was formed. num_arrived: commitments before it. num_mixed: of these, the first so many
    may have been put back in another order, after a batch that could not be read."""

    train_step: int
    version: int
    eta: int
    groups: tuple[Committed, ...]
    num_arrived: int
    num_mixed: int

    def rank(self, group: Committed) -> tuple[int, int]:
        """The lower, the sooner taken."""
        return group.min_version, max(group.arrival, self.num_mixed)


def find_forgotten(waiting: Mapping[int, Committed], last: Batch | None, *, data_ended: bool) -> Iterator[str]:
    """Why each of the waiting groups (by id) that should not wait is an offender.

    last: the newest batch of the history that survives. data_ended: the run is finished
    because no prompt was left, not because it had done its steps.
    """
    for group_id, group in waiting.items():
        where = f"group {group_id}, committed in {group.path}, was neither trained nor left out"
        if data_ended:
            yield f"{where}, although the data ended"
        elif last is None or group.arrival >= last.num_arrived:
            continue  # it came too late for the newest batch
        elif group.min_version < last.version - last.eta:
            yield f"{where}, although step {last.train_step} found it too old (version {group.min_version})"
        elif last.groups[0].epoch == group.epoch and last.rank(group) < max(map(last.rank, last.groups)):
            yield f"{where}, although step {last.train_step} took younger groups (it is of version {group.min_version})"
