"""Who computes what in one training step: minibatches, data-parallel ranks, micro-batches.

Pure functions of lengths, called by `step` and `sft` on every rank: all ranks work out the
whole plan from the manifest, so that no communication is needed to agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_hpc.config.schema import TrainerConfig
from areal_hpc.trainer.microbatch import balanced, first_fit_decreasing, pad_count, padded, split_minibatches


@dataclass(frozen=True)
class Share:
    """One dp rank's part of some rows: micro-batches of indices into the batch.

    All dp ranks have the same number of micro-batches; some may be empty.
    """

    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> list[int]:
        return sorted(index for micro_batch in self.micro_batches for index in micro_batch)


@dataclass(frozen=True)
class StepPlan:
    """`minibatches[m]`: every row of minibatch m; `shares[m]`: this rank's part of it;
    `whole`: this rank's part of all minibatches, as micro-batches for a forward pass."""

    minibatches: tuple[tuple[int, ...], ...]
    shares: tuple[Share, ...]
    whole: Share


def plan_step(trainer: TrainerConfig, lengths: Sequence[int], num_minibatches: int, seed: int, dp_rank: int) -> StepPlan:
    """The plan of one step over rows of these lengths (whole batch, the manifest's order).

    Minibatches do not depend on the layout. Within each, rows go to dp ranks by token
    count: a rank with more than its share would make all others wait in every update.
    """
    minibatches = split_minibatches(lengths, min(num_minibatches, len(lengths)), seed)
    shares = [_shares(trainer, lengths, minibatch) for minibatch in minibatches]
    owned: list[list[int]] = [
        [index for per_rank in shares for index in per_rank[rank].rows] for rank in range(trainer.dp)
    ]
    whole = _cut(trainer, lengths, owned)
    return StepPlan(
        minibatches=tuple(tuple(minibatch) for minibatch in minibatches),
        shares=tuple(per_rank[dp_rank] for per_rank in shares),
        whole=whole[dp_rank],
    )


def assign_ranks(lengths: Sequence[int], rows: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Rows per rank: longest first, each to the rank with the fewest tokens so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for index in sorted(rows, key=lambda index: (-lengths[index], index)):
        target = min(range(num_ranks), key=lambda rank: (tokens[rank], rank))
        ranks[target].append(index)
        tokens[target] += lengths[index]
    return ranks


def _shares(trainer: TrainerConfig, lengths: Sequence[int], rows: Sequence[int]) -> list[Share]:
    return _cut(trainer, lengths, assign_ranks(lengths, rows, trainer.dp))


def _cut(trainer: TrainerConfig, lengths: Sequence[int], owned: Sequence[Sequence[int]]) -> list[Share]:
    """Each rank's rows as micro-batches, equally many on all ranks."""
    cuts = [_micro_batches(trainer, lengths, rows) for rows in owned]
    num = max(1, *(len(cut) for cut in cuts))
    return [Share(tuple(tuple(each) for each in pad_count(cut, num))) for cut in cuts]


def _micro_batches(trainer: TrainerConfig, lengths: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
    chosen = [lengths[index] for index in rows]
    budget = trainer.micro_batch_tokens
    if trainer.packing == "balanced":
        local = balanced(chosen, budget, trainer.min_micro_batches)
    elif trainer.packing == "ffd":
        local = first_fit_decreasing(chosen, budget)
    else:
        local = padded(chosen, max(1, budget // max(lengths)))
    return [[rows[index] for index in micro_batch] for micro_batch in local]
