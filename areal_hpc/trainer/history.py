"""Weights of the last versions, to compare log-probabilities where engine and trainer held the same.

When the trainer is the slower side, no batch holds tokens of the very version it is trained
from: without a memory of older weights a wrong mask, temperature or stale KV would show
nowhere. A snapshot stays until tokens of its version have come back in a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from areal_hpc.trainer.microbatch import balanced
from areal_hpc.types import Trajectory

if TYPE_CHECKING:
    from areal_hpc.trainer.batch import Row
    from areal_hpc.trainer.megatron import MegatronTrainer
    from areal_hpc.trainer.step import FreshGap

MAX_ROWS = 16
"""Sequences compared per step: enough to see an error, few beside a batch."""


class WeightHistory:
    """Up to `size` snapshots of this rank's weights. All ranks hold the same versions."""

    def __init__(self, size: int, max_staleness: int) -> None:
        self._size = size
        self._max_staleness = max_staleness
        self._snapshots: dict[int, list[Tensor]] = {}
        self._measured: set[int] = set()

    def keep(self, version: int, engine: MegatronTrainer) -> None:
        """Remember the current weights as `version` if there is room."""
        for old in sorted(self._snapshots):
            full = len(self._snapshots) >= self._size
            if version - old > self._max_staleness or (full and old in self._measured):
                del self._snapshots[old]
        self._measured &= self._snapshots.keys()
        if len(self._snapshots) < self._size:
            self._snapshots[version] = engine.snapshot()

    def choose(self, trajectories: list[Trajectory], version: int) -> tuple[int, list[int]]:
        """(version, rows): the kept version other than `version` with most tokens in the batch, and
        the rows that hold most of them. No rows if there is none."""
        counts = {
            kept: [int(((t.versions == kept) & (t.loss_mask > 0)).sum()) for t in trajectories]
            for kept in self._snapshots
            if kept != version
        }
        best = max(counts, key=lambda kept: (sum(counts[kept]), kept), default=version)
        if best == version or not sum(counts[best]):
            return version, []
        order = sorted(range(len(trajectories)), key=lambda row: (-counts[best][row], row))[:MAX_ROWS]
        return best, [row for row in order if counts[best][row]]

    def measure(
        self, engine: MegatronTrainer, trajectories: list[Trajectory], rows: list[Row], version: int,
        capacity: int, gap: FreshGap,
    ) -> None:  # fmt: skip
        """Add the gaps of an older version's tokens, computed with the weights that made them.

        Every data-parallel rank computes the same rows; the first one counts.
        """
        old, chosen = self.choose(trajectories, version)
        if not chosen:
            return
        picked = [rows[row] for row in chosen]
        with engine.using(self._snapshots[old]):
            found = engine.forward_logprobs(picked, balanced([row.num_tokens for row in picked], capacity))
        self._measured.add(old)
        if not engine.place.counts or engine.place.dp_rank:
            return
        for index, logprobs in found.items():
            mask = np.asarray(picked[index].values["loss_mask"])
            distance = np.where(mask, trajectories[chosen[index]].versions - old, 1)
            gap.add(mask, distance, logprobs, picked[index].values["rollout_logprobs"])
