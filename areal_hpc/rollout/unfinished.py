"""Answers that a stop cuts short: out of the episodes into a shard, and back into a later run's.

A row of such a shard is one turn of one sample: what the engine was asked (loss_mask 0) and
what it had answered (loss_mask 1) with log-probabilities and versions, token by token. Its
only reward part is the number of the turn. Answers that were whole are rows too: their
group was not. The shards lie apart from the spool, under a run id of their own, so that
neither kind can be taken for the other. Written and read by the rollout's loop.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from areal_hpc.paths import RunPaths
from areal_hpc.rollout.generation import Generation
from areal_hpc.spool.shard import ShardError, read_rows
from areal_hpc.types import PROMPT_VERSION, Lease, Trajectory, unfinished_run_id

logger = logging.getLogger(__name__)

TURN = "turn"


@dataclass(frozen=True)
class Turn:
    """`generation` follows `context`, the token ids that the engine was given."""

    context: list[int]
    generation: Generation


Turns = dict[tuple[int, int], Turn]
"""(sample_index, number of the turn) -> turn."""


def to_rows(turns: Turns, lease: Lease) -> list[Trajectory]:
    """One row for each turn that has at least one generated token."""
    return [_to_row(lease, key, turn) for key, turn in turns.items() if len(turn.generation.token_ids)]


def _to_row(lease: Lease, key: tuple[int, int], turn: Turn) -> Trajectory:
    generation, count = turn.generation, len(turn.context)
    return Trajectory(
        tokens=np.concatenate([np.asarray(turn.context, np.int32), generation.token_ids]),
        loss_mask=np.repeat(np.array([0, 1], np.uint8), [count, len(generation.token_ids)]),
        rollout_logprobs=np.concatenate([np.zeros(count, np.float32), generation.logprobs]),
        versions=np.concatenate([np.full(count, PROMPT_VERSION, np.int32), generation.versions]),
        reward=0.0,
        prompt_id=lease.prompt.prompt_id,
        group_id=lease.group_id,
        sample_index=key[0],
        finish_reason=generation.finish_reason,
        reward_parts={TURN: float(key[1])},
    )


def read_turns(paths: RunPaths, run_name: str, lease: Lease) -> Turns:
    """What an earlier run left of this lease's group; empty, with a warning, if it cannot be read."""
    assert lease.begun is not None
    try:
        rows = read_rows(
            paths.resolve_inside(lease.begun.path), lease.begun.rows, run_id=unfinished_run_id(run_name),
            verify=True, wait_s=paths.visible_s,
        )  # fmt: skip
    except (ShardError, OSError) as error:
        logger.warning("group %d is answered anew, what was left of it is lost: %s", lease.group_id, error)
        return {}
    return {(row.sample_index, int(row.reward_parts[TURN])): _to_turn(row) for row in rows}


def _to_turn(row: Trajectory) -> Turn:
    start = row.num_tokens - row.num_loss_tokens
    return Turn(
        row.tokens[:start].tolist(),
        Generation(row.tokens[start:], row.rollout_logprobs[start:], row.versions[start:], row.finish_reason),
    )
