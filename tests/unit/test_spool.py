"""The spool: what is read is what was written, and damage of every kind is named."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from areal_hpc.spool import hdf5, shard
from areal_hpc.spool.schema import ShardError
from areal_hpc.spool.shard import ShardWriter, quarantine, read_index, read_rows
from areal_hpc.types import PROMPT_VERSION, Trajectory

RUN = "run-a"


def make_trajectory(generator: np.random.Generator, group: int, sample: int, **changes: object) -> Trajectory:
    prompt_tokens, answer_tokens = (int(n) for n in generator.integers(1, 40, 2))
    total = prompt_tokens + answer_tokens
    mask = np.r_[np.zeros(prompt_tokens, np.uint8), np.ones(answer_tokens, np.uint8)]
    values = {
        "tokens": generator.integers(0, 2**31 - 1, total).astype(np.int32),
        "loss_mask": mask,
        "rollout_logprobs": (-generator.random(total) * mask).astype(np.float32),
        "versions": np.where(mask, generator.integers(3, 7, total), PROMPT_VERSION).astype(np.int32),
        "reward": float(np.float32(generator.random())),
        "prompt_id": 100 + group,
        "group_id": group,
        "sample_index": sample,
        "finish_reason": ["stop", "length"][int(generator.integers(2))],
        "reward_parts": {"math": float(sample), "format": 0.5},
    }
    return Trajectory(**(values | changes))


def make_groups(num_groups: int, group_size: int = 4, seed: int = 0) -> list[Trajectory]:
    generator = np.random.default_rng(seed)
    return [make_trajectory(generator, g, k) for g in range(num_groups) for k in range(group_size)]


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for name in ("tokens", "loss_mask", "rollout_logprobs", "versions"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
    for name in ("reward", "prompt_id", "group_id", "sample_index", "finish_reason", "reward_parts"):
        assert getattr(left, name) == getattr(right, name), name


@pytest.fixture
def written(tmp_path):
    trajectories = make_groups(10)
    return trajectories, ShardWriter(tmp_path / "rollout-00000", RUN, 0).commit(trajectories)


def test_round_trip_is_byte_for_byte(written):
    trajectories, info = written
    found = read_rows(info.path, run_id=RUN, verify=True)
    assert len(found) == len(trajectories)
    for left, right in zip(trajectories, found, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("rows", [[], [0], [39], [5, 4, 5], [3, 17, 18, 19, 2], list(range(0, 40, 2)), list(range(39, -1, -1))])
@pytest.mark.parametrize("limit", [1, 32])
@pytest.mark.parametrize("verify", [False, True])
def test_selected_rows_keep_their_order(written, monkeypatch, rows, limit, verify):
    monkeypatch.setattr("areal_hpc.spool.shard.MAX_READS", limit)
    trajectories, info = written
    found = read_rows(info.path, rows, run_id=RUN, verify=verify)
    assert len(found) == len(rows)
    for row, trajectory in zip(rows, found, strict=True):
        assert_same(trajectories[row], trajectory)


def test_row_descriptions_agree_with_the_trajectories(written):
    trajectories, info = written
    assert info.num_bytes == os.path.getsize(info.path)
    for index, (row, trajectory) in enumerate(zip(info.rows, trajectories, strict=True)):
        trained = [int(v) for v, m in zip(trajectory.versions, trajectory.loss_mask, strict=True) if m]
        assert row.row == index
        assert (row.group_id, row.prompt_id, row.sample_index) == (
            trajectory.group_id, trajectory.prompt_id, trajectory.sample_index,
        )
        assert (row.num_tokens, row.num_loss_tokens) == (len(trajectory.tokens), len(trained))
        assert (row.min_version, row.max_version) == (min(trained), max(trained))
        assert row.min_version == trajectory.min_version
        assert (row.reward, row.finish_reason) == (trajectory.reward, trajectory.finish_reason)
    assert read_index(info.path, run_id=RUN) == info
    assert [row.checksum for row in info.rows] == [trajectory.checksum for trajectory in trajectories]
    for row, kept in zip(info.rows, trajectories, strict=True):
        arrays = (kept.tokens, kept.loss_mask, kept.rollout_logprobs, kept.versions)
        assert row.checksum == zlib.crc32(b"".join(array.tobytes() for array in arrays))


def test_trajectory_without_trained_tokens_has_no_version(tmp_path):
    generator = np.random.default_rng(1)
    empty = make_trajectory(generator, 0, 0)
    empty = make_trajectory(generator, 0, 0, **{
        name: getattr(empty, name) for name in ("tokens", "rollout_logprobs", "versions")
    }, loss_mask=np.zeros_like(empty.loss_mask))
    info = ShardWriter(tmp_path, RUN, 0).commit([make_trajectory(generator, 0, 1), empty])
    assert (info.rows[1].num_loss_tokens, info.rows[1].min_version, info.rows[1].max_version) == (0, -1, -1)


def test_layout_is_the_documented_one(written):
    trajectories, info = written
    with h5py.File(info.path) as file:
        assert {name: file[name].dtype.str for name in file} == {
            "tokens": "<i4", "rollout_logprobs": "<f4", "versions": "<i4", "loss_mask": "|u1",
            "offsets": "<i8", "trajectories": file["trajectories"].dtype.str, "reward_parts": "<f4",
        }
        assert file["trajectories"].dtype.names == (
            "group_id", "prompt_id", "sample_index", "num_tokens", "num_loss_tokens", "min_version", "max_version",
            "reward", "finish_reason", "checksum",
        )
        assert file["tokens"][()].tobytes() == b"".join(sample.tokens.tobytes() for sample in trajectories)
        assert file["trajectories"]["reward"].tolist() == [sample.reward for sample in trajectories]
        assert all(file[name].chunks is None for name in file)
        assert file.attrs["schema_version"] == 1
        assert file.attrs["run_id"] == RUN.encode()
        assert file.attrs["writer_rank"] == 0
        assert file.attrs["digest"] == info.digest.encode()
        assert json.loads(file.attrs["labels"])["reward_parts"] == ["math", "format"]
    assert os.stat(info.path).st_mode & 0o777 == 0o600
    assert os.environ["HDF5_USE_FILE_LOCKING"] == "FALSE"


def test_names_never_repeat_and_leftovers_go(tmp_path):
    trajectories = make_groups(1)
    names = set()
    for _ in range(3):
        (tmp_path / ".old.h5.tmp").write_bytes(b"half")
        writer = ShardWriter(tmp_path, RUN, 0)
        names |= {writer.commit(trajectories).path.name for _ in range(3)}
    assert len(names) == 9
    assert {path.name for path in tmp_path.iterdir()} == names


def test_what_cannot_be_a_shard_is_refused(tmp_path):
    writer = ShardWriter(tmp_path, RUN, 0)
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="at least one"):
        writer.commit([])
    with pytest.raises(ValueError, match="reward parts differ"):
        writer.commit([make_trajectory(generator, 0, 0), make_trajectory(generator, 0, 1, reward_parts={"a": 1.0})])
    hollow = {
        "tokens": np.zeros(0, np.int32), "loss_mask": np.zeros(0, np.uint8),
        "rollout_logprobs": np.zeros(0, np.float32), "versions": np.zeros(0, np.int32),
    }
    with pytest.raises(ValueError, match="at least one token"):
        writer.commit([make_trajectory(generator, 0, 0, **hollow)])
    assert list(tmp_path.iterdir()) == []


def test_arrays_need_not_lie_in_one_piece(tmp_path):
    [whole] = make_groups(1, 1)
    names = ("tokens", "loss_mask", "rollout_logprobs", "versions")
    strided = dataclasses.replace(whole, **{name: np.repeat(getattr(whole, name), 2)[::2] for name in names})
    assert strided.checksum == whole.checksum
    [found] = read_rows(ShardWriter(tmp_path, RUN, 0).commit([strided]).path, verify=True)
    assert_same(whole, found)


@pytest.mark.parametrize("num_tokens", [1, 500, 700, 3000, 100_000])
def test_shards_of_every_size_are_laid_out_as_expected(tmp_path, num_tokens):
    arrays = {
        "tokens": np.arange(num_tokens, dtype=np.int32), "loss_mask": np.ones(num_tokens, np.uint8),
        "rollout_logprobs": np.zeros(num_tokens, np.float32), "versions": np.full(num_tokens, 3, np.int32),
    }
    for parts in ({}, {"math": 1.0}, {f"part {number} {'x' * 100}": 0.5 for number in range(60)}):
        sample = make_trajectory(np.random.default_rng(0), 0, 0, reward_parts=parts, **arrays)
        [found] = read_rows(ShardWriter(tmp_path, RUN, 0).commit([sample]).path, verify=True)
        assert_same(sample, found)


def test_another_layout_is_an_error_that_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "first_place", lambda reserved: reserved + 5000)
    with pytest.raises(RuntimeError, match="HDF5 put tokens"):
        ShardWriter(tmp_path, RUN, 0).commit(make_groups(1))
    assert list(tmp_path.iterdir()) == []


def test_trajectories_cannot_be_changed_and_must_fit():
    [sample] = make_groups(1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.reward = 2.0
    with pytest.raises(ValueError, match="one shape"):
        dataclasses.replace(sample, versions=sample.versions[1:])
    assert dataclasses.replace(sample, reward=2.0).reward_parts == sample.reward_parts


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    with h5py.File(path) as file:
        start = file["rollout_logprobs"].id.get_offset()
    if how == "empty":
        data = b""
    elif how == "short":
        data = data[:100]
    elif how == "truncated":
        data = data[: len(data) - 50]
    elif how == "zeros":
        data = bytes(len(data))
    elif how == "text":
        data = b"not a shard\n" * 100
    path.write_bytes(data)
    if how == "bit":
        with open(path, "r+b") as file:
            file.seek(start + 6)
            byte = file.read(1)[0]
            file.seek(start + 6)
            file.write(bytes([byte ^ 4]))
    if how == "schema":
        with h5py.File(path, "r+") as file:
            file.attrs["schema_version"] = 2
    if how == "foreign":
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(10)
    if how == "dataset":
        with h5py.File(path, "r+") as file:
            del file["versions"]
    if how == "type":
        with h5py.File(path, "r+") as file:
            values = file["versions"][()]
            del file["versions"]
            file["versions"] = values.astype(np.int64)
    if how == "lengths":
        with h5py.File(path, "r+") as file:
            values = file["versions"][()]
            del file["versions"]
            file["versions"] = values[:-1]
    if how == "pieces":
        with h5py.File(path, "r+") as file:
            values = file["versions"][()]
            del file["versions"]
            file.create_dataset("versions", data=values, chunks=(16,))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "how", ["empty", "short", "truncated", "zeros", "text", "schema", "foreign", "dataset", "type", "lengths", "pieces"]
)
def test_damage_is_named(written, how, verify):
    _, info = written
    damage(info.path, how)
    with pytest.raises(ShardError, match=info.path.name):
        read_rows(info.path, run_id=RUN, verify=verify)


def test_flipped_bit_is_found_by_the_digest(written):
    _, info = written
    damage(info.path, "bit")
    read_rows(info.path, run_id=RUN)
    for read in (lambda: read_rows(info.path, [0], verify=True), lambda: read_index(info.path)):
        with pytest.raises(ShardError, match="row 0 do not have the checksum"):
            read()
    assert len(read_rows(info.path, [1, 39], verify=True)) == 2  # the other rows are good
    assert read_index(info.path, verify=False) == info


def test_every_data_byte_is_under_the_digest(tmp_path):
    info = ShardWriter(tmp_path, RUN, 0).commit(make_groups(1, 2))
    whole = info.path.read_bytes()
    with h5py.File(info.path) as file:
        spans = {name: (file[name].id.get_offset(), file[name].id.get_storage_size()) for name in file}
    for name, (start, size) in spans.items():
        for position in (start, start + size // 2, start + size - 1):
            changed = bytearray(whole)
            changed[position] ^= 1
            info.path.write_bytes(changed)
            with pytest.raises(ShardError):
                read_rows(info.path, verify=True)
    info.path.write_bytes(whole)
    read_rows(info.path, verify=True)


def test_another_run_is_refused_and_rows_are_bounded(written):
    _, info = written
    with pytest.raises(ShardError, match="belongs to run 'run-a', not to 'run-b'"):
        read_rows(info.path, run_id="run-b")
    with pytest.raises(ShardError, match="it has 40"):
        read_rows(info.path, [40])
    with pytest.raises(ShardError, match="it has 40"):
        read_rows(info.path, [-1])


def test_missing_file_and_late_name(written, tmp_path):
    trajectories, info = written
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "nothing.h5")
    hidden = info.path.with_name("hidden")
    os.rename(info.path, hidden)
    # A folder cache that lags: the announced name shows up a little later.
    late = subprocess.Popen(["sh", "-c", 'sleep 0.3; mv "$0" "$1"', str(hidden), str(info.path)])
    assert len(read_rows(info.path, wait_s=10.0)) == len(trajectories)
    late.wait()


@pytest.mark.parametrize("where", ["open", "HDF5"])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_an_error_of_the_filesystem_that_passes_is_no_damage(written, monkeypatch, where, num_failures):
    trajectories, info = written
    left = num_failures
    module, error = {
        "open": (shard.os, OSError(errno.ESTALE, "Stale file handle")),
        "HDF5": (hdf5.h5f, OSError("file read failed: errno = 5, Input/output error")),
    }[where]
    real = module.open

    def failing(path, *arguments):
        nonlocal left
        if left and str(info.path) in (str(path), os.fsdecode(path)):
            left -= 1
            raise error
        return real(path, *arguments)

    monkeypatch.setattr(module, "open", failing)
    if num_failures == 1:
        assert len(read_rows(info.path, verify=True)) == len(trajectories)
    else:
        with pytest.raises(ShardError, match=f"{info.path.name}.*(Stale|Input/output)"):
            read_index(info.path)
    assert left == 0


def test_quarantine_moves_and_warns_once(written, tmp_path, caplog):
    _, info = written
    with caplog.at_level("WARNING"):
        target = quarantine(info.path, tmp_path / "quarantine", "zero-filled")
    assert not info.path.exists() and target.exists()
    assert target.parent == tmp_path / "quarantine"
    assert [record.message.count(info.path.name) > 0 for record in caplog.records] == [True]
    assert "zero-filled" in caplog.text


DISK_FULL = """
import sys
import zlib
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_spool import make_groups, RUN
from areal_hpc.durable import DiskFullError, write_durably
from areal_hpc.spool.shard import ShardWriter, read_rows
folder = Path(sys.argv[1])
trajectories = make_groups(40)
writer = ShardWriter(folder, RUN, 0)
first = writer.commit(trajectories)
filler = folder / "filler"
import os
failed = 0
free = lambda: os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
# Every amount of free space, page by page, so that metadata is hit as well as data.
for pages in range(0, 40):
    filler.unlink(missing_ok=True)
    size = free() - pages * 4096
    filler.write_bytes(bytes(size))
    try:
        writer.commit(trajectories).path.unlink()
    except DiskFullError as error:
        failed += 1
        assert str(folder) in str(error) and "bytes" in str(error) and ".h5" in str(error), error
    assert sorted(p.name for p in folder.iterdir()) == sorted([first.path.name, "filler"])
    assert len(os.listdir("/proc/self/fd")) < 20
assert 5 < failed < 40, failed
filler.write_bytes(bytes(filler.stat().st_size + free()))
try:
    write_durably(folder / "x.json", bytes(10000))
    raise SystemExit("no error")
except DiskFullError as error:
    assert "10000 bytes" in str(error)
assert not [p for p in folder.iterdir() if "tmp" in p.name]
filler.unlink()
assert len(read_rows(writer.commit(trajectories).path, verify=True)) == len(trajectories)
print("failed", failed)
"""


def test_full_disk_names_path_and_bytes_and_leaves_nothing(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    probe = ["unshare", "--user", "--map-root-user", "--mount"]
    script = tmp_path / "fill.py"
    script.write_text(DISK_FULL.format(tests=str(Path(__file__).parent)))
    if subprocess.run([*probe, "true"], capture_output=True).returncode:
        pytest.skip("no unprivileged mount namespace for a small tmpfs")
    command = 'mount -t tmpfs -o size=1m none "$0" && exec "$1" "$2" "$0"'
    done = subprocess.run(
        [*probe, "sh", "-c", command, str(mount), sys.executable, str(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
