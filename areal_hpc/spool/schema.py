"""The layout of a spool shard: names, types and how trajectories and arrays correspond.

Pure numpy, no file access; `spool.shard` writes and reads it, the offline tools import it.
A shard holds whole groups of N trajectories with T tokens in all:

    tokens, rollout_logprobs, versions, loss_mask   [T], trajectories one after the other
    offsets [N + 1]         where each trajectory's tokens lie in these
    trajectories [N]        a table: prompt, group, reward, lengths, versions, checksum
    reward_parts [N, K]     one column for each name in the attribute `labels`

Attributes: schema_version, run_id, writer_rank, labels (JSON), digest. Each row's checksum
covers its tokens, the digest everything else, checksums included.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from areal_hpc.types import PROMPT_VERSION, ShardRow, Trajectory

SCHEMA_VERSION = 1

TOKEN_ARRAYS = {"tokens": "<i4", "rollout_logprobs": "<f4", "versions": "<i4", "loss_mask": "|u1"}
"""Name -> stored type of each per-token array."""

TABLE = np.dtype(
    [
        ("group_id", "<i8"),
        ("prompt_id", "<i8"),
        ("sample_index", "<i4"),
        ("num_tokens", "<i4"),
        ("num_loss_tokens", "<i4"),
        ("min_version", "<i4"),
        ("max_version", "<i4"),
        ("reward", "<f4"),
        ("finish_reason", "<u4"),
        ("checksum", "<u4"),
    ]
)
"""One row a trajectory, the fields of ShardRow; finish_reason indexes the labels' list."""


HEAD_ARRAYS = {"trajectories": TABLE, "offsets": np.dtype("<i8"), "reward_parts": np.dtype("<f4")}
"""Name -> type of the arrays beside the tokens."""

BLOCK_ROWS = 64
"""Rows that are described at a time: their tokens stay in the processor's cache from one look to the next."""


class ShardError(ValueError):
    """A shard that cannot be trusted: damaged, foreign or of another schema."""


@dataclass(frozen=True)
class Labels:
    """The names that give codes and columns of a shard their meaning."""

    finish_reasons: tuple[str, ...]
    part_names: tuple[str, ...]

    @functools.cached_property
    def stored(self) -> str:
        return json.dumps({"finish_reasons": self.finish_reasons, "reward_parts": self.part_names})

    @staticmethod
    def parse(stored: str) -> Labels:
        """ShardError if it is something else."""
        try:
            found = json.loads(stored)
            return Labels(tuple(found["finish_reasons"]), tuple(found["reward_parts"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"its labels are not readable: {error}") from None


@dataclass(frozen=True)
class ShardHead:
    """Everything in a shard but the tokens."""

    run_id: str
    writer_rank: int
    labels: Labels
    trajectories: np.ndarray
    offsets: np.ndarray
    reward_parts: np.ndarray

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in HEAD_ARRAYS}

    @property
    def num_rows(self) -> int:
        return len(self.trajectories)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def digest(self) -> str:
        """BLAKE3 over identity, labels and arrays; over the tokens by way of their checksums."""
        identity = json.dumps([SCHEMA_VERSION, self.run_id, self.writer_rank, self.labels.stored])
        state = blake3(identity.encode())
        for array in self.arrays.values():
            state.update(array.tobytes())
        return state.hexdigest()

    def rows(self) -> tuple[ShardRow, ...]:
        """What the controller needs to know of each row."""
        reason = TABLE.names.index("finish_reason")
        names = self.labels.finish_reasons
        return tuple(
            ShardRow(row, *entry[:reason], names[entry[reason]], *entry[reason + 1 :])
            for row, entry in enumerate(self.trajectories.tolist())
        )

    def check(self) -> None:
        """Cheap consistency; ShardError says what does not fit."""
        lengths = self.trajectories["num_tokens"]
        if not self.num_rows or self.offsets.shape != (self.num_rows + 1,) or self.offsets[0] != 0:
            raise ShardError(f"{self.num_rows} trajectories and {len(self.offsets)} offsets do not fit")
        if np.any(np.diff(self.offsets) != lengths) or np.any(lengths <= 0):
            raise ShardError("offsets and lengths differ: every trajectory has at least one token")
        if self.reward_parts.shape != (self.num_rows, len(self.labels.part_names)):
            raise ShardError(f"reward_parts has the shape {self.reward_parts.shape}")
        if int(self.trajectories["finish_reason"].max()) >= len(self.labels.finish_reasons):
            raise ShardError(f"a finish_reason is not among {list(self.labels.finish_reasons)}")


def check(trajectories: Sequence[Trajectory]) -> None:
    """Whether they can make one shard.

    Raises ValueError for an empty list, a trajectory without tokens, reward parts that
    differ or arrays of another type than the shard's.
    """
    if not trajectories:
        raise ValueError("a shard needs at least one trajectory")
    kinds = tuple(np.dtype(kind) for kind in TOKEN_ARRAYS.values())
    types = operator.attrgetter(*(f"{name}.dtype" for name in TOKEN_ARRAYS))
    parts = trajectories[0].reward_parts.keys()
    for trajectory in trajectories:
        if types(trajectory) != kinds:
            found = {name: str(getattr(trajectory, name).dtype) for name in TOKEN_ARRAYS}
            raise ValueError(f"prompt {trajectory.prompt_id} has the types {found}; a shard holds {TOKEN_ARRAYS}")
        if not trajectory.num_tokens:
            raise ValueError(f"an answer to prompt {trajectory.prompt_id} has no token: it needs at least one token")
        if trajectory.reward_parts.keys() != parts:
            raise ValueError(
                f"reward parts differ within a shard: {sorted(parts)} and {sorted(trajectory.reward_parts)} "
                f"(prompt {trajectory.prompt_id})"
            )


def make_labels(trajectories: Sequence[Trajectory]) -> Labels:
    reasons = {trajectory.finish_reason for trajectory in trajectories}
    return Labels(tuple(sorted(reasons)), tuple(trajectories[0].reward_parts))


def make_head(trajectories: Sequence[Trajectory], labels: Labels, run_id: str, writer_rank: int) -> ShardHead:
    """The head of a shard of these trajectories, which `check` has passed."""
    code = {reason: index for index, reason in enumerate(labels.finish_reasons)}
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    offsets = np.zeros(len(lengths) + 1, HEAD_ARRAYS["offsets"])
    np.cumsum(lengths, out=offsets[1:])
    described = [
        _describe(trajectories[first : first + BLOCK_ROWS], offsets[:-1][first : first + BLOCK_ROWS])
        for first in range(0, len(trajectories), BLOCK_ROWS)
    ]
    checksums, num_trained, oldest, newest = (np.concatenate(columns) for columns in zip(*described, strict=True))
    columns = {
        "group_id": [trajectory.group_id for trajectory in trajectories],
        "prompt_id": [trajectory.prompt_id for trajectory in trajectories],
        "sample_index": [trajectory.sample_index for trajectory in trajectories],
        "num_tokens": lengths,
        "num_loss_tokens": num_trained,
        "min_version": oldest,
        "max_version": newest,
        "reward": [trajectory.reward for trajectory in trajectories],
        "finish_reason": [code[trajectory.finish_reason] for trajectory in trajectories],
        "checksum": checksums,
    }
    table = np.empty(len(lengths), TABLE)
    for name, column in columns.items():
        table[name] = column
    parts = [[trajectory.reward_parts[name] for name in labels.part_names] for trajectory in trajectories]
    reward_parts = np.array(parts, HEAD_ARRAYS["reward_parts"]).reshape(len(lengths), len(labels.part_names))
    return ShardHead(run_id, writer_rank, labels, table, offsets, reward_parts)


def _describe(trajectories: Sequence[Trajectory], offsets: np.ndarray) -> tuple[np.ndarray, ...]:
    """[N] each: checksum, number of trained tokens, oldest and newest version among these.

    offsets: [N], where each trajectory's tokens begin in the shard.
    """
    checksums = np.array([trajectory.checksum for trajectory in trajectories], np.uint32)
    num_trained = np.array([np.count_nonzero(trajectory.loss_mask) for trajectory in trajectories], np.int32)
    # Over all rows at once: reduceat works on the segments between their starts.
    starts = offsets - offsets[0]
    untrained = np.concatenate([trajectory.loss_mask for trajectory in trajectories]) == 0
    versions = np.concatenate([trajectory.versions for trajectory in trajectories])
    np.copyto(versions, PROMPT_VERSION, where=untrained)
    newest = np.maximum.reduceat(versions, starts)
    np.copyto(versions, np.iinfo(np.int32).max, where=untrained)
    oldest = np.minimum.reduceat(versions, starts)
    oldest[num_trained == 0] = PROMPT_VERSION
    return checksums, num_trained, oldest, newest


def make_trajectories(
    head: ShardHead, arrays: dict[str, np.ndarray], rows: Sequence[int], starts: Sequence[int]
) -> list[Trajectory]:
    """The trajectories `rows`; `starts[k]` is where the tokens of the k-th begin in `arrays`."""
    tokens, logprobs, versions, mask = (arrays[name] for name in TOKEN_ARRAYS)
    entries = head.trajectories[list(rows)]
    columns = (
        entries[name].tolist()
        for name in ("num_tokens", "reward", "prompt_id", "group_id", "sample_index", "finish_reason")
    )
    parts = head.reward_parts[list(rows)].tolist()
    reasons, names = head.labels.finish_reasons, head.labels.part_names
    # In the order of the fields, which costs less than by their names.
    return [
        Trajectory(
            tokens[start : start + length],
            mask[start : start + length],
            logprobs[start : start + length],
            versions[start : start + length],
            reward,
            prompt_id,
            group_id,
            sample_index,
            reasons[reason],
            dict(zip(names, values, strict=True)),
        )
        for start, values, length, reward, prompt_id, group_id, sample_index, reason in zip(
            starts, parts, *columns, strict=True
        )
    ]
