"""Writes and reads spool shards: HDF5 files that are whole once they have their final name.

`ShardWriter` belongs to one rollout rank and writes in that rank's own folder; trainers
and offline tools call `read_rows` and `read_index`. No locks, no SWMR, no pickle. Datasets
are contiguous: a shard is written once and read in a few large pieces (chunks and
compression cost several times the disk's own time). HDF5 lays the file out; the tokens go
from the trajectories' own arrays to their places in it without a copy.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Network filesystems often refuse HDF5's advisory locks; whole files behind an atomic rename
# need none. The library reads this when it is loaded, hence before the import of h5py.
os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"
from h5py import h5a, h5d, h5f, h5p, h5s, h5t  # noqa: E402

from areal_hpc.durable import disk_full, sync_folder, write_all  # noqa: E402
from areal_hpc.spool.schema import (  # noqa: E402
    HEAD_ARRAYS,
    SCHEMA_VERSION,
    TOKEN_ARRAYS,
    Labels,
    ShardError,
    ShardHead,
    check,
    make_head,
    make_labels,
    make_trajectories,
)
from areal_hpc.types import ShardRow, Trajectory, token_checksum  # noqa: E402

__all__ = ["ShardError", "ShardInfo", "ShardWriter", "quarantine", "read_head", "read_index", "read_rows"]

SUFFIX = ".h5"
METADATA_BYTES = 16 * 1024
"""Twice what HDF5's own structures take in a shard, the labels aside."""
TOKEN_BYTES = sum(np.dtype(kind).itemsize for kind in TOKEN_ARRAYS.values())
PASSING = (errno.EIO, errno.ESTALE)
"""Answers of a filesystem that may be others a moment later."""
AGAIN_S = 0.1
MAX_READS = 32
"""More pieces than this are read as one span: each costs a call per array."""
MAX_GATHER = 512
"""Arrays in one vectored write; the system takes 1,024."""


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
        check(trajectories)
        self._count += 1
        path = self._folder / f"{self._life}-{self._count:06d}{SUFFIX}"
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            head, num_bytes = _write(temporary, trajectories, self._run_id, self._writer_rank)
            os.rename(temporary, path)
            sync_folder(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            expected = sum(trajectory.num_tokens for trajectory in trajectories) * TOKEN_BYTES
            raise disk_full(error, path, expected + METADATA_BYTES) or error from None
        return ShardInfo(path, head.digest(), head.rows(), num_bytes)


def _again(read: Callable[..., Any]) -> Callable[..., Any]:
    """Read once more what the system failed to read: on a network filesystem that may pass."""

    @functools.wraps(read)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return read(*arguments, **options)
        except ShardError as error:
            if not isinstance(error.__cause__, OSError):
                raise
        time.sleep(AGAIN_S)
        return read(*arguments, **options)

    return call


@_again
def read_rows(
    path: str | Path,
    rows: Sequence[int] | None = None,
    *,
    run_id: str | None = None,
    verify: bool = False,
    wait_s: float = 0.0,
) -> list[Trajectory]:
    """The trajectories `rows` of a shard in that order, all of them for None.

    Checks the schema, the run and that lengths fit; `verify` also the digest and the
    checksums of the rows that are read. `wait_s` is how long a name that was announced may
    stay invisible (a network filesystem's cached folder) before FileNotFoundError is raised.
    Raises ShardError for a file that fails. The arrays may be views of one buffer.
    """
    with _opened(Path(path), wait_s) as file:
        head = _read_head(file, run_id, verify)
        chosen = list(range(head.num_rows)) if rows is None else list(rows)
        if chosen and not (0 <= min(chosen) and max(chosen) < head.num_rows):
            raise ShardError(f"row {max(chosen, key=abs)} was asked for, it has {head.num_rows}")
        arrays, starts = _read_tokens(file, head, chosen)
        if verify:
            _check_tokens(head, arrays, starts)
        return make_trajectories(head, arrays, chosen, [starts[row] for row in chosen])


@_again
def read_index(
    path: str | Path, *, run_id: str | None = None, verify: bool = True, wait_s: float = 0.0
) -> ShardInfo:
    """What `commit` returned for this shard, from the file alone. Raises ShardError.

    Without `verify` the tokens are not read: a few milliseconds whatever the size.
    """
    with _opened(Path(path), wait_s) as file:
        head = _read_head(file, run_id, verify)
        if verify:
            arrays, starts = _read_tokens(file, head, range(head.num_rows))
            _check_tokens(head, arrays, starts)
        return ShardInfo(Path(path), _text(file, "digest"), head.rows(), os.path.getsize(path))


@_again
def read_head(path: str | Path) -> tuple[ShardHead, str]:
    """Everything of a shard but its tokens, and the digest, which holds for what is returned.

    For walks over many shards. Raises ShardError and FileNotFoundError.
    """
    with _opened(Path(path), 0.0, whole=False) as file:
        return _read_head(file, None, True), _text(file, "digest")


def quarantine(path: Path, folder: Path, reason: str) -> Path:
    """Move a damaged shard out of the spool; warns with its name. Returns where it lies now."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"{path.parent.name}-{path.name}"
    os.rename(path, target)
    logging.getLogger(__name__).warning("quarantined damaged shard %s as %s: %s", path, target, reason)
    return target


# ---- writing ---------------------------------------------------------------------------


def _write(path: Path, trajectories: Sequence[Trajectory], run_id: str, writer_rank: int) -> tuple[ShardHead, int]:
    """Write and sync the file; returns its head and size.

    The tokens come first: while the disk works on them, their checksums are computed.
    HDF5 itself writes only its own structures, into space that is reserved before: when
    these meet a full disk HDF5 may crash the process.
    """
    labels = make_labels(trajectories)
    num_reserved = METADATA_BYTES + 4 * len(labels.stored)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(descriptor, _empty_file())
        os.posix_fallocate(descriptor, 0, num_reserved)
        file = h5f.open(os.fsencode(path), h5f.ACC_RDWR, _access(num_reserved // 2))
        try:
            places = _lay_out(file, trajectories, len(labels.part_names))
            for name in TOKEN_ARRAYS:
                _gather(descriptor, [getattr(trajectory, name) for trajectory in trajectories], places[name])
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # starts the transfer to the disk
            head = make_head(trajectories, labels, run_id, writer_rank)
            for name, array in head.arrays.items():
                if array.size:
                    _gather(descriptor, [array], places[name])
            _set_attributes(file, head)
        finally:
            file.close()
        os.fsync(descriptor)
        return head, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _lay_out(file: h5f.FileID, trajectories: Sequence[Trajectory], num_parts: int) -> dict[str, int]:
    """Create the datasets; returns where in the file the bytes of each belong.

    The low-level API with ready-made types: it takes a third of the time.
    """
    num_rows, num_tokens = len(trajectories), sum(trajectory.num_tokens for trajectory in trajectories)
    shapes = {name: (num_tokens,) for name in TOKEN_ARRAYS}
    shapes |= {"trajectories": (num_rows,), "offsets": (num_rows + 1,), "reward_parts": (num_rows, num_parts)}
    # Given a place at once and never filled: the bytes are written past HDF5.
    reserved = h5p.create(h5p.DATASET_CREATE)
    reserved.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    reserved.set_fill_time(h5d.FILL_TIME_NEVER)
    return {
        name: h5d.create(file, name.encode(), _types()[name], h5s.create_simple(shape), reserved).get_offset()
        for name, shape in shapes.items()
    }


def _set_attributes(file: h5f.FileID, head: ShardHead) -> None:
    attributes: dict[str, str | int] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": head.run_id,
        "writer_rank": head.writer_rank,
        "labels": head.labels.stored,
        "digest": head.digest(),
    }
    space = h5s.create(h5s.SCALAR)
    for name, value in attributes.items():
        stored = np.array(value.encode() if isinstance(value, str) else value)
        kind = h5t.py_create(stored.dtype)
        h5a.create(file, name.encode(), kind, space).write(stored, kind)


def _gather(descriptor: int, arrays: list[np.ndarray], place: int) -> None:
    """Write arrays one after the other from `place` on, without joining them first."""
    for first in range(0, len(arrays), MAX_GATHER):
        pieces = [np.ascontiguousarray(array) for array in arrays[first : first + MAX_GATHER]]
        end = place + sum(piece.nbytes for piece in pieces)
        place += os.pwritev(descriptor, pieces, place)
        if place < end:  # the system took a part only: the rest in one piece
            rest = memoryview(b"".join(pieces))[place - end :]
            while rest:
                place += (count := os.pwrite(descriptor, rest, place))
                rest = rest[count:]


@functools.cache
def _types() -> dict[str, h5t.TypeID]:
    """HDF5's type of each dataset."""
    kinds = {name: np.dtype(kind) for name, kind in TOKEN_ARRAYS.items()} | HEAD_ARRAYS
    return {name: h5t.py_create(kind) for name, kind in kinds.items()}


def _access(metadata_bytes: int = 2048) -> h5p.PropFAID:
    """`metadata_bytes`: HDF5's own structures are put together in pieces of that size."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_LATEST, h5f.LIBVER_LATEST)
    access.set_meta_block_size(metadata_bytes)
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


# ---- reading ---------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, wait_s: float, *, whole: bool = True) -> Iterator[h5f.FileID]:
    """The open file; whatever is wrong with it comes out as ShardError with its path.

    whole: most of the file will be read.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            # Opened by name, never found by listing: a cached folder may lag behind a rename.
            descriptor = os.open(path, os.O_RDONLY)
            break
        except FileNotFoundError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            raise ShardError(f"shard {path} cannot be opened: {error}") from error
    try:
        # HDF5's first look at its own structures, here and there in the file, shall not wait for each.
        if whole:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        file = h5f.open(os.fsencode(path), h5f.ACC_RDONLY, _access())
        try:
            yield file
        finally:
            file.close()
    except (ShardError, OSError, RuntimeError, KeyError, TypeError) as error:
        # HDF5 answers damage with any of these, depending on the layer that trips over it.
        raise ShardError(f"shard {path} is not readable: {' '.join(str(error).split())[:300]}") from error
    finally:
        os.close(descriptor)


def _text(file: h5f.FileID, name: str) -> str:
    return _attribute(file, name).decode()


def _attribute(file: h5f.FileID, name: str) -> Any:
    attribute = h5a.open(file, name.encode())
    value = np.empty(attribute.shape, attribute.dtype)
    attribute.read(value)
    return value.item()


def _read_head(file: h5f.FileID, run_id: str | None, verify: bool) -> ShardHead:
    """Everything but the tokens; ShardError for another schema, another run or what does not fit."""
    if not h5a.exists(file, b"schema_version"):
        raise ShardError("no shard of this project: it has no schema_version")
    schema_version = _attribute(file, "schema_version")
    if schema_version != SCHEMA_VERSION:
        raise ShardError(f"schema version {schema_version}, this program reads {SCHEMA_VERSION}")
    if run_id is not None and _text(file, "run_id") != run_id:
        raise ShardError(f"it belongs to run {_text(file, 'run_id')!r}, not to {run_id!r}")
    head = ShardHead(
        run_id=_text(file, "run_id"),
        writer_rank=_attribute(file, "writer_rank"),
        labels=Labels.parse(_text(file, "labels")),
        **{name: _read(file, name) for name in HEAD_ARRAYS},
    )
    head.check()
    if verify and head.digest() != _text(file, "digest"):
        raise ShardError(f"its digest is {head.digest()[:16]}, the file says {_text(file, 'digest')[:16]}")
    return head


def _read(file: h5f.FileID, name: str) -> np.ndarray:
    dataset = _dataset(file, name)
    array = np.empty(dataset.shape, HEAD_ARRAYS[name])
    if array.size:
        dataset.read(h5s.ALL, h5s.ALL, array, _types()[name])
    return array


def _dataset(file: h5f.FileID, name: str) -> h5d.DatasetID:
    dataset = h5d.open(file, name.encode())
    if not dataset.get_type().equal(_types()[name]):
        raise ShardError(f"{name} has the type {dataset.dtype}")
    return dataset


def _read_tokens(
    file: h5f.FileID, head: ShardHead, rows: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[int, int]]:
    """The per-token arrays of `rows`, and where each of these rows starts in them."""
    pieces = _pieces(rows)
    offsets = head.offsets.tolist()
    starts: dict[int, int] = {}
    length = 0
    for first, last in pieces:
        base = length - offsets[first]
        starts |= {row: base + offsets[row] for row in range(first, last)}
        length += offsets[last] - offsets[first]
    arrays = {}
    for name, kind in TOKEN_ARRAYS.items():
        dataset = _dataset(file, name)
        if dataset.shape != (head.num_tokens,):
            raise ShardError(f"{name} has the shape {dataset.shape}, offsets say ({head.num_tokens},)")
        arrays[name] = array = np.empty(length, kind)
        position = 0
        for first, last in pieces:
            count = offsets[last] - offsets[first]
            chosen = dataset.get_space()
            chosen.select_hyperslab((offsets[first],), (count,))
            dataset.read(h5s.create_simple((count,)), chosen, array[position : position + count], _types()[name])
            position += count
    return arrays, starts


def _pieces(rows: Sequence[int]) -> list[tuple[int, int]]:
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


def _check_tokens(head: ShardHead, arrays: dict[str, np.ndarray], starts: dict[int, int]) -> None:
    lengths, checksums = head.trajectories["num_tokens"].tolist(), head.trajectories["checksum"].tolist()
    in_order = [arrays[name] for name in ("tokens", "loss_mask", "rollout_logprobs", "versions")]
    for row, start in starts.items():
        if token_checksum(*(array[start : start + lengths[row]] for array in in_order)) != checksums[row]:
            raise ShardError(f"the tokens of row {row} do not have the checksum that was written with them")
