"""The layout of a spool shard: names, types and how trajectories become flat arrays.

Pure numpy, no file access; `spool.shard` writes and reads it, the offline tools import it.
A shard holds whole groups. `offsets` [N + 1] says where each trajectory's tokens lie in
the flat per-token arrays [T]; every other array has one entry per trajectory [N].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_hpc.types import PROMPT_VERSION, ShardRow, Trajectory, token_checksum

SCHEMA_VERSION = 1

TOKEN_ARRAYS = {"tokens": "<i4", "rollout_logprobs": "<f4", "versions": "<i4", "loss_mask": "|u1"}
"""Name -> stored type of each flat per-token array [T]."""

ROW_ARRAYS = {
    "reward": "<f4",
    "prompt_id": "<i8",
    "group_id": "<i8",
    "sample_index": "<i4",
    "finish_reason": "|u1",
}
"""Name -> stored type of each per-trajectory array [N]; finish_reason indexes the attribute's list."""


class ShardError(ValueError):
    """A shard that cannot be trusted: damaged, foreign or of another schema."""


@dataclass(frozen=True)
class ShardArrays:
    """The contents of one shard as flat arrays."""

    arrays: dict[str, np.ndarray]
    offsets: np.ndarray
    reward_parts: np.ndarray
    part_names: tuple[str, ...]
    finish_reasons: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])


def flatten(trajectories: Sequence[Trajectory]) -> ShardArrays:
    """Trajectories -> flat arrays. ValueError for an empty list or reward parts that differ."""
    if not trajectories:
        raise ValueError("a shard needs at least one trajectory")
    part_names = tuple(trajectories[0].reward_parts)
    finish_reasons = tuple(sorted({trajectory.finish_reason for trajectory in trajectories}))
    code = {reason: index for index, reason in enumerate(finish_reasons)}
    for trajectory in trajectories:
        if trajectory.reward_parts.keys() != set(part_names):
            raise ValueError(
                f"reward parts differ within a shard: {sorted(part_names)} and "
                f"{sorted(trajectory.reward_parts)} (prompt {trajectory.prompt_id})"
            )
    columns: dict[str, list[float]] = {
        "reward": [trajectory.reward for trajectory in trajectories],
        "prompt_id": [trajectory.prompt_id for trajectory in trajectories],
        "group_id": [trajectory.group_id for trajectory in trajectories],
        "sample_index": [trajectory.sample_index for trajectory in trajectories],
        "finish_reason": [code[trajectory.finish_reason] for trajectory in trajectories],
    }
    arrays = {
        name: np.concatenate(
            [getattr(trajectory, name) for trajectory in trajectories], dtype=kind, casting="same_kind"
        )
        for name, kind in TOKEN_ARRAYS.items()
    }
    arrays |= {name: np.array(columns[name], kind) for name, kind in ROW_ARRAYS.items()}
    parts = [[trajectory.reward_parts[name] for name in part_names] for trajectory in trajectories]
    offsets = np.zeros(len(trajectories) + 1, "<i8")
    np.cumsum([trajectory.num_tokens for trajectory in trajectories], out=offsets[1:])
    reward_parts = np.array(parts, "<f4").reshape(len(trajectories), len(part_names))
    return ShardArrays(arrays, offsets, reward_parts, part_names, finish_reasons)


def unflatten(shard: ShardArrays, rows: Sequence[int], starts: Sequence[int]) -> list[Trajectory]:
    """The trajectories `rows`; `starts[k]` is where row k's tokens begin in the per-token arrays."""
    tokens, logprobs, versions, mask = (shard.arrays[name] for name in TOKEN_ARRAYS)
    reward, prompt_id, group_id, sample_index, reason = (
        shard.arrays[name][rows].tolist() for name in ROW_ARRAYS
    )
    lengths = np.diff(shard.offsets)[rows].tolist()
    parts = shard.reward_parts[rows].tolist()
    trajectories = []
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        span = slice(start, start + length)
        trajectories.append(
            Trajectory(
                tokens=tokens[span],
                loss_mask=mask[span],
                rollout_logprobs=logprobs[span],
                versions=versions[span],
                reward=reward[index],
                prompt_id=prompt_id[index],
                group_id=group_id[index],
                sample_index=sample_index[index],
                finish_reason=shard.finish_reasons[reason[index]],
                reward_parts=dict(zip(shard.part_names, parts[index], strict=True)),
            )
        )
    return trajectories


def describe_rows(shard: ShardArrays) -> tuple[ShardRow, ...]:
    """What the controller needs to know of each row."""
    mask = shard.arrays["loss_mask"].astype(bool)
    versions = shard.arrays["versions"]
    starts = shard.offsets[:-1]
    # reduceat needs non-empty segments: an empty trajectory is refused by check().
    oldest = np.minimum.reduceat(np.where(mask, versions, np.iinfo(np.int32).max), starts)
    newest = np.maximum.reduceat(np.where(mask, versions, PROMPT_VERSION), starts)
    num_loss_tokens = np.add.reduceat(mask, starts, dtype=np.int64)
    oldest = np.where(num_loss_tokens > 0, oldest, PROMPT_VERSION)
    reasons = [shard.finish_reasons[code] for code in shard.arrays["finish_reason"].tolist()]
    columns = [
        shard.arrays["group_id"],
        shard.arrays["prompt_id"],
        shard.arrays["sample_index"],
        np.diff(shard.offsets),
        num_loss_tokens,
        oldest,
        newest,
        shard.arrays["reward"],
    ]
    listed = [column.tolist() for column in columns]
    per_token = [shard.arrays[name] for name in ("tokens", "loss_mask", "rollout_logprobs", "versions")]
    checksums = [
        token_checksum(*(array[start:end] for array in per_token))
        for start, end in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True)
    ]
    return tuple(
        ShardRow(row, *values, finish_reason=reason, checksum=checksum)
        for row, (values, reason, checksum) in enumerate(
            zip(zip(*listed, strict=True), reasons, checksums, strict=True)
        )
    )


def check(shard: ShardArrays) -> None:
    """Cheap consistency of lengths and codes; ShardError says what does not fit."""
    offsets = shard.offsets
    if len(offsets) < 2 or offsets[0] != 0 or np.any(np.diff(offsets) <= 0):
        raise ShardError("offsets do not rise from 0: every trajectory needs at least one token")
    if shard.reward_parts.shape != (shard.num_rows, len(shard.part_names)):
        raise ShardError(
            f"reward_parts has the shape {shard.reward_parts.shape}, expected "
            f"({shard.num_rows}, {len(shard.part_names)})"
        )
    codes = shard.arrays["finish_reason"]
    if codes.size and int(codes.max()) >= len(shard.finish_reasons):
        raise ShardError(f"finish_reason {int(codes.max())} is not among {list(shard.finish_reasons)}")


def labels(shard: ShardArrays) -> str:
    """The names that give the codes and columns their meaning, as stored (JSON)."""
    return json.dumps({"finish_reasons": shard.finish_reasons, "reward_parts": shard.part_names})
