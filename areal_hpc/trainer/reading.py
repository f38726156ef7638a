"""Reads the rows of a batch from the spool, and finds damage before anything is trained.

Called by `step` on every trainer rank. What cannot be read goes back to the controller
(`loop` answers BatchRefused), which has these groups answered again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist

from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import ShardError, read_rows
from areal_hpc.types import ALL_VERSIONS, BatchManifest, Trajectory, distinct_version


class BatchDamaged(Exception):
    """Nothing was trained: `damaged` maps the shards that a rank could not read to what is wrong."""

    def __init__(self, damaged: dict[str, str]) -> None:
        super().__init__("; ".join(f"{path}: {reason}" for path, reason in damaged.items()))
        self.damaged = damaged


def read_batch(manifest: BatchManifest, paths: RunPaths, run_id: str) -> list[Trajectory]:
    """All trajectories of the batch in the manifest's order. Raises BatchDamaged.

    Every rank reads all rows: rewards of whole groups are needed everywhere, and a batch
    is small beside what the forward pass moves. Versions that were lost and given again
    are moved away from those in use (`types.distinct_version`).
    """
    by_shard: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(manifest.rows):
        by_shard[row.shard].append(place)
    found: dict[int, Trajectory] = {}
    damaged: dict[str, str] = {}
    # One wait for the whole batch: its names were all announced before.
    end = time.monotonic() + paths.visible_s
    for shard, places in by_shard.items():
        path = manifest.shards[shard]
        rows = [manifest.rows[place] for place in places]
        try:
            trajectories = read_rows(
                paths.resolve_inside(path), [row.row for row in rows], run_id=run_id, verify=True,
                wait_s=end - time.monotonic(),
            )  # fmt: skip
        except ShardError as error:
            damaged[path] = str(error)
            continue
        except FileNotFoundError:
            damaged[path] = "it is missing"
            continue
        for place, row, trajectory in zip(places, rows, trajectories, strict=True):
            # Byte for byte what the engine produced: the checksum was made before it was written.
            if (trajectory.group_id, trajectory.checksum) != (row.group_id, row.checksum):
                damaged[path] = (
                    f"row {row.row} is not what its rollout produced: group {row.group_id} with checksum "
                    f"{row.checksum:08x} was announced, the shard holds group {trajectory.group_id} with "
                    f"{trajectory.checksum:08x}"
                )
            newest = manifest.newest_versions[shard] if manifest.newest_versions else ALL_VERSIONS
            found[place] = keep_apart(trajectory, newest)
    if damaged:
        raise BatchDamaged(damaged)
    return [found[place] for place in range(len(manifest.rows))]


def keep_apart(trajectory: Trajectory, newest: int) -> Trajectory:
    """With `distinct_version` as the version of each trained token."""
    lost = (trajectory.versions > newest) & (trajectory.loss_mask != 0)
    if not lost.any():
        return trajectory
    versions = trajectory.versions.copy()
    versions[lost] = [distinct_version(version, newest) for version in versions[lost].tolist()]
    return replace(trajectory, versions=versions)


def read_together(manifest: BatchManifest, paths: RunPaths, run_id: str, device: torch.device) -> list[Trajectory]:
    """As `read_batch`; raises BatchDamaged on every rank if one of them could not read its batch."""
    damaged: dict[str, str] = {}
    trajectories: list[Trajectory] = []
    try:
        trajectories = read_batch(manifest, paths, run_id)
    except BatchDamaged as error:
        damaged = error.damaged
    # A number in the common case; what is wrong only where something is.
    num_damaged = torch.tensor([len(damaged)], device=device)
    dist.all_reduce(num_damaged)
    if num_damaged.item():
        everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, damaged)
        raise BatchDamaged({path: reason for theirs in everyone for path, reason in theirs.items()})
    return trajectories
