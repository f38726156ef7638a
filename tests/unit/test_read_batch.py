"""The trainer finds damage in a batch before it trains on any of it, and says which shards it is in."""

from __future__ import annotations

import time

import pytest

from areal_hpc.controller.batcher import ReadyGroup, make_manifest, split_groups
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import ShardWriter
from areal_hpc.trainer.reading import BatchDamaged, read_batch
from test_spool import RUN, assert_same, damage, make_groups


@pytest.fixture
def batch(tmp_path):
    """Three shards of two groups, and the manifest of all of them."""
    paths = RunPaths(tmp_path, visible_s=0.2)
    paths.create()
    writer = ShardWriter(paths.rollout_spool(0), RUN, 0)
    trajectories = make_groups(6, 4)
    infos = [writer.commit(trajectories[first : first + 8]) for first in (0, 8, 16)]
    groups = [
        ReadyGroup(group_id, 0, paths.relative(info.path), rows)
        for info in infos
        for group_id, rows in split_groups(info.rows).items()
    ]
    return paths, infos, trajectories, make_manifest(groups, train_step=1, version=0, dp=2)


def test_a_whole_batch_comes_in_the_order_of_its_manifest(batch):
    paths, _, trajectories, manifest = batch
    for left, right in zip(read_batch(manifest, paths, RUN), trajectories, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("how", ["truncated", "zeros", "bit", "foreign", "schema", "missing", "swapped", "reward", "run"])
def test_every_damaged_shard_is_named_and_no_other(batch, how):
    paths, infos, _, manifest = batch
    path = infos[1].path
    if how == "missing":
        path.unlink()
    elif how == "swapped":
        path.write_bytes(infos[0].path.read_bytes())
    elif how == "run":
        ShardWriter(paths.root / "other", "run-b", 0).commit(make_groups(6, 4)[8:16]).path.rename(path)
    elif how == "reward":
        import h5py

        with h5py.File(path, "r+") as file:
            table = file["trajectories"][()]
            table["reward"][3] += 1.0
            file["trajectories"][()] = table
    else:
        damage(path, how)
    infos[2].path.unlink()
    begin = time.monotonic()
    with pytest.raises(BatchDamaged) as caught:
        read_batch(manifest, paths, RUN)
    assert time.monotonic() > begin + paths.visible_s
    assert set(caught.value.damaged) == {paths.relative(path), paths.relative(infos[2].path)}
    assert caught.value.damaged[paths.relative(infos[2].path)] == "it is missing"


def test_a_name_is_waited_for_as_long_as_the_folder_was_seen_to_lag(batch):
    import threading

    paths, infos, trajectories, manifest = batch
    paths = paths.seen_after(5.0)
    assert paths.visible_s == 10.0 and paths.seen_after(0.1).visible_s == 10.0
    hidden = infos[1].path.with_name("hidden")
    infos[1].path.rename(hidden)
    timer = threading.Timer(0.3, hidden.rename, [infos[1].path])
    timer.start()
    assert len(read_batch(manifest, paths, RUN)) == len(trajectories)
    timer.join()
