"""The audit's look at answers that a stop cut short and a later attempt went on with.

A token that is older than the lease under which its answer was finished cannot come from
that lease's engine: it must be, bit for bit, one that was saved at the stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_hpc.paths import RunPaths
from areal_hpc.types import ShardRow, Trajectory


@dataclass(frozen=True)
class Continued:
    """What a group was granted with, under weights of `version`: rows of a shard of unfinished answers."""

    path: str
    rows: tuple[int, ...]
    version: int


def find_foreign_tokens(
    paths: RunPaths, group: int, path: str, rows: Sequence[ShardRow], continued: Continued
) -> list[str]:
    """One line for each trained sample of the group with an old token that was not saved."""
    from areal_hpc.spool.shard import ShardError, read_rows

    try:
        saved = read_rows(paths.resolve_inside(continued.path), continued.rows, verify=True)
        trained = read_rows(paths.resolve_inside(path), [row.row for row in rows])
    except (ShardError, OSError) as error:
        return [f"group {group} went on with {continued.path}: {error}"]
    return [
        f"sample {sample.sample_index} of group {group} (row {row.row} of {path}) has tokens older than version "
        f"{continued.version}, under which it was finished, that are not those saved in {continued.path}"
        for sample, row in zip(trained, rows, strict=True)
        if not _explained(sample, [part for part in saved if part.sample_index == sample.sample_index], continued)
    ]


def _explained(sample: Trajectory, saved: list[Trajectory], continued: Continued) -> bool:
    old = (sample.loss_mask != 0) & (sample.versions < continued.version)
    length = int(np.flatnonzero(old)[-1]) + 1 if old.any() else 0
    found = np.zeros(length, bool)
    for part in saved:
        common = min(length, part.num_tokens)
        if not np.array_equal(part.tokens[:common], sample.tokens[:common]):
            continue
        found[:common] |= (
            (part.loss_mask[:common] != 0)
            & (part.versions[:common] == sample.versions[:common])
            & (part.rollout_logprobs[:common] == sample.rollout_logprobs[:common])
        )
    return bool(found[old[:length]].all())
