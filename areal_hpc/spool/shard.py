"""Writes and reads spool shards: HDF5 files that are whole once they have their final name.

`ShardWriter` belongs to one rollout rank and writes in that rank's own folder; trainers
and offline tools call `read_rows`. No locks, no SWMR, no pickle. Datasets are stored
contiguously: a shard is written once and read in a few large pieces (a chunked or
compressed layout costs several times the disk's own time).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

# Network filesystems often refuse HDF5's advisory locks; whole files behind an atomic rename
# need none. The library reads this when it is loaded, hence before the import of h5py.
os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"
from h5py import h5a, h5d, h5f, h5p, h5s, h5t  # noqa: E402

from areal_hpc.durable import disk_full, sync_folder, write_all  # noqa: E402
from areal_hpc.spool.schema import (  # noqa: E402
    ROW_ARRAYS,
    SCHEMA_VERSION,
    TOKEN_ARRAYS,
    ShardArrays,
    ShardError,
    check,
    describe_rows,
    flatten,
    labels,
    unflatten,
)
from areal_hpc.types import ShardRow, Trajectory  # noqa: E402

SUFFIX = ".h5"
METADATA_BYTES = 32 * 1024
"""More than HDF5's own structures take in a shard (measured: 6 KiB, and the labels)."""
MAX_READS = 32
"""More pieces than this are read as one span: each costs a call per array."""


@dataclass(frozen=True)
class ShardInfo:
    """A committed shard."""

    path: Path
    digest: str
    rows: tuple[ShardRow, ...]
    num_bytes: int


class ShardWriter:
    """Commits shards into one folder; one writer per folder."""

    def __init__(self, folder: Path, run_id: str, writer_rank: int) -> None:
        self._folder = Path(folder)
        self._run_id = run_id
        self._writer_rank = writer_rank
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self._folder.glob(f".*{SUFFIX}.tmp"):
            leftover.unlink()
        # A restarted writer must never meet a name of its earlier lives: time orders the
        # names, the random part keeps them apart even when a clock was set back.
        self._life = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._count = 0

    def commit(self, trajectories: Sequence[Trajectory]) -> ShardInfo:
        """Write whole groups as one shard and return what the controller needs to know of it.

        When this returns, the shard is on disk under its final name. Raises ValueError for
        trajectories that do not fit one shard and DiskFullError, leaving no file, when
        space runs out.
        """
        shard = flatten(trajectories)
        check(shard)
        digest = digest_of(shard, self._run_id, self._writer_rank)
        self._count += 1
        path = self._folder / f"{self._life}-{self._count:06d}{SUFFIX}"
        temporary = path.with_name(f".{path.name}.tmp")
        attributes = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self._run_id,
            "writer_rank": self._writer_rank,
            "labels": labels(shard),
            "digest": digest,
        }
        try:
            num_bytes = _write(temporary, shard, attributes)
            os.rename(temporary, path)
            sync_folder(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise disk_full(error, path, _num_bytes(shard) + METADATA_BYTES) or error from None
        return ShardInfo(path, digest, describe_rows(shard), num_bytes)


def read_rows(
    path: str | Path,
    rows: Sequence[int] | None = None,
    *,
    run_id: str | None = None,
    verify: bool = False,
    wait_s: float = 0.0,
) -> list[Trajectory]:
    """The trajectories `rows` of a shard in that order, all of them for None.

    Checks the schema, the run and that lengths fit; `verify` reads everything and also
    checks the digest. `wait_s` is how long a name that was announced may stay invisible (a
    network filesystem's cached folder) before FileNotFoundError is raised. Raises ShardError
    for a file that fails. The arrays may be views of one buffer.
    """
    with _opened(Path(path), wait_s) as file:
        head = _read_head(file, run_id)
        chosen = list(range(head.num_rows)) if rows is None else list(rows)
        if chosen and not (0 <= min(chosen) and max(chosen) < head.num_rows):
            raise ShardError(f"row {max(chosen, key=abs)} was asked for, it has {head.num_rows}")
        shard, starts = _read_tokens(file, head, range(head.num_rows) if verify else chosen)
        if verify:
            _check_digest(file, shard)
        return unflatten(shard, chosen, [starts[row] for row in chosen])


def read_index(path: str | Path, *, run_id: str | None = None, wait_s: float = 0.0) -> ShardInfo:
    """What `commit` returned for this shard, from the file alone; the digest is checked.

    Raises ShardError.
    """
    with _opened(Path(path), wait_s) as file:
        head = _read_head(file, run_id)
        shard, _ = _read_tokens(file, head, range(head.num_rows))
        _check_digest(file, shard)
        return ShardInfo(Path(path), _text(file, "digest"), describe_rows(shard), os.path.getsize(path))


def quarantine(path: Path, folder: Path, reason: str) -> Path:
    """Move a damaged shard out of the spool; warns with its name. Returns where it lies now."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"{path.parent.name}-{path.name}"
    os.rename(path, target)
    logging.getLogger(__name__).warning("quarantined damaged shard %s as %s: %s", path, target, reason)
    return target


def digest_of(shard: ShardArrays, run_id: str, writer_rank: int) -> str:
    """BLAKE3 over identity, labels and every array's bytes, in the order of the schema."""
    state = blake3(json.dumps([SCHEMA_VERSION, run_id, writer_rank, labels(shard)]).encode())
    for name in (*TOKEN_ARRAYS, *ROW_ARRAYS):
        state.update(np.ascontiguousarray(shard.arrays[name]).data.cast("B"))
    state.update(shard.offsets.data.cast("B"))
    if shard.reward_parts.size:
        state.update(shard.reward_parts.data.cast("B"))
    return state.hexdigest()


def _write(path: Path, shard: ShardArrays, attributes: dict[str, str | int]) -> int:
    """Write and sync the file; returns its size. The low-level API: a dataset costs half the time.

    Space is reserved first, through a descriptor of our own: HDF5 may crash the process when
    its metadata meets a full disk, so it must never meet one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(descriptor, _empty_file())
        os.posix_fallocate(descriptor, 0, _num_bytes(shard) + METADATA_BYTES)
        file = h5f.open(os.fsencode(path), h5f.ACC_RDWR, _access())
        try:
            for name, array in _datasets(shard).items():
                kind, space = h5t.py_create(array.dtype), h5s.create_simple(array.shape)
                dataset = h5d.create(file, name.encode(), kind, space)
                if array.size:
                    dataset.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(array))
            for name, value in attributes.items():
                stored = np.array(value.encode() if isinstance(value, str) else value)
                kind, space = h5t.py_create(stored.dtype), h5s.create(h5s.SCALAR)
                h5a.create(file, name.encode(), kind, space).write(stored)
        finally:
            # Gives back the reserved space that was not needed.
            file.close()
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _access() -> h5p.PropFAID:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_LATEST, h5f.LIBVER_LATEST)
    # Closing the file closes it, even while a dataset object (or a traceback) is still alive.
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    return access


@functools.cache
def _empty_file() -> bytes:
    """The bytes of an HDF5 file with nothing in it."""
    access = _access()
    access.set_fapl_core(4096, False)
    file = h5f.create(b"empty", h5f.ACC_TRUNC, None, access)
    h5f.flush(file)
    image = file.get_file_image()
    file.close()
    return image


def _num_bytes(shard: ShardArrays) -> int:
    return sum(array.nbytes for array in _datasets(shard).values())


def _datasets(shard: ShardArrays) -> dict[str, np.ndarray]:
    return shard.arrays | {"offsets": shard.offsets, "reward_parts": shard.reward_parts}


@contextmanager
def _opened(path: Path, wait_s: float) -> Iterator[h5f.FileID]:
    """The open file; whatever is wrong with it comes out as ShardError with its path."""
    end = time.monotonic() + wait_s
    while True:
        try:
            # Opened by name, never found by listing: a cached folder may lag behind a rename.
            os.close(os.open(path, os.O_RDONLY))
            break
        except FileNotFoundError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)
    try:
        file = h5f.open(os.fsencode(path), h5f.ACC_RDONLY, _access())
        try:
            yield file
        finally:
            file.close()
    except (ShardError, OSError, RuntimeError, KeyError, TypeError) as error:
        # HDF5 answers damage with any of these, depending on the layer that trips over it.
        raise ShardError(f"shard {path} is not readable: {' '.join(str(error).split())[:300]}") from error


def _text(file: h5f.FileID, name: str) -> str:
    return _attribute(file, name).decode()


def _attribute(file: h5f.FileID, name: str) -> Any:
    attribute = h5a.open(file, name.encode())
    value = np.empty(attribute.shape, attribute.dtype)
    attribute.read(value)
    return value.item()


def _read_head(file: h5f.FileID, run_id: str | None) -> ShardArrays:
    """Everything but the tokens; ShardError for another schema, another run or odd lengths."""
    if not h5a.exists(file, b"schema_version"):
        raise ShardError("no shard of this project: it has no schema_version")
    schema_version = _attribute(file, "schema_version")
    if schema_version != SCHEMA_VERSION:
        raise ShardError(f"schema version {schema_version}, this program reads {SCHEMA_VERSION}")
    if run_id is not None and _text(file, "run_id") != run_id:
        raise ShardError(f"it belongs to run {_text(file, 'run_id')!r}, not to {run_id!r}")
    names = json.loads(_text(file, "labels"))
    arrays = {name: _column(file, name, kind) for name, kind in ROW_ARRAYS.items()}
    offsets, parts = _column(file, "offsets", "<i8"), _column(file, "reward_parts", "<f4")
    head = ShardArrays(arrays, offsets, parts, tuple(names["reward_parts"]), tuple(names["finish_reasons"]))
    check(head)
    return head


def _column(file: h5f.FileID, name: str, kind: str) -> np.ndarray:
    dataset = _dataset(file, name, kind)
    array = np.empty(dataset.shape, kind)
    if array.size:
        dataset.read(h5s.ALL, h5s.ALL, array)
    return array


def _dataset(file: h5f.FileID, name: str, kind: str) -> h5d.DatasetID:
    dataset = h5d.open(file, name.encode())
    if dataset.dtype != np.dtype(kind):
        raise ShardError(f"{name} has the type {dataset.dtype}, expected {np.dtype(kind)}")
    return dataset


def _read_tokens(
    file: h5f.FileID, head: ShardArrays, rows: Sequence[int]
) -> tuple[ShardArrays, dict[int, int]]:
    """`head` with the per-token arrays of `rows`, and where each of them starts in these."""
    pieces = _pieces(head.offsets, rows)
    starts: dict[int, int] = {}
    length = 0
    for first, last in pieces:
        base = length - int(head.offsets[first])
        starts |= {row: base + int(head.offsets[row]) for row in range(first, last)}
        length += int(head.offsets[last] - head.offsets[first])
    arrays = dict(head.arrays)
    for name, kind in TOKEN_ARRAYS.items():
        dataset = _dataset(file, name, kind)
        if dataset.shape != (head.num_tokens,):
            raise ShardError(f"{name} has the shape {dataset.shape}, offsets say ({head.num_tokens},)")
        arrays[name] = array = np.empty(length, kind)
        position = 0
        for first, last in pieces:
            start, count = int(head.offsets[first]), int(head.offsets[last] - head.offsets[first])
            chosen = dataset.get_space()
            chosen.select_hyperslab((start,), (count,))
            dataset.read(h5s.create_simple((count,)), chosen, array[position : position + count])
            position += count
    return replace(head, arrays=arrays), starts


def _pieces(offsets: np.ndarray, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open runs of rows that cover `rows`; one run where many small ones would cost more."""
    if not rows:
        return []
    wanted = sorted(set(rows))
    pieces = [[wanted[0], wanted[0] + 1]]
    for row in wanted[1:]:
        if row == pieces[-1][1]:
            pieces[-1][1] = row + 1
        else:
            pieces.append([row, row + 1])
    if len(pieces) > MAX_READS:
        pieces = [[wanted[0], wanted[-1] + 1]]
    return [(first, last) for first, last in pieces]


def _check_digest(file: h5f.FileID, shard: ShardArrays) -> None:
    said = _text(file, "digest")
    found = digest_of(shard, _text(file, "run_id"), _attribute(file, "writer_rank"))
    if found != said:
        raise ShardError(f"the data has the digest {found[:16]}, the file says {said[:16]}")
