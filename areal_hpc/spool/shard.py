"""Writes and reads spool shards: HDF5 files that are whole once they have their final name.

`ShardWriter` belongs to one rollout rank and writes in that rank's own folder; trainers
and offline tools call `read_rows` and `read_index`. No locks, no SWMR, no pickle. Datasets
are contiguous: a shard is written once and read in a few large pieces (chunks and
compression cost several times the disk's own time). HDF5 lays the file out; the tokens go
from the trajectories' own arrays to their places in it without a copy, and come from there.
The processor is the bottleneck, not the disk, so both work at the same time.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_hpc.durable import disk_full, sync_folder, write_all
from areal_hpc.spool import hdf5
from areal_hpc.spool.schema import (
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
from areal_hpc.types import ShardRow, Trajectory, token_checksum

__all__ = ["ShardError", "ShardInfo", "ShardWriter", "quarantine", "read_head", "read_index", "read_rows"]

SUFFIX = ".h5"
TOKEN_BYTES = sum(hdf5.KINDS[name].itemsize for name in TOKEN_ARRAYS)
PASSING = (errno.EIO, errno.ESTALE)
"""Answers of a filesystem that may be others a moment later."""
AGAIN_S = 0.1
MAX_READS = 32
"""More pieces than this are read as one span: each costs a call per array."""
MAX_GATHER = 1024
"""Arrays in one vectored write: what the system takes."""
FRONT_BYTES = 16 * 1024
BACK_SHARE = 64
"""What is read ahead of the tokens: so much at a shard's front, this share of it more at its back."""


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
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")

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
            head, num_bytes = _write(temporary, trajectories, self._run_id, self._writer_rank, self._helper)
            os.rename(temporary, path)
            sync_folder(self._folder)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            expected = sum(trajectory.num_tokens for trajectory in trajectories) * TOKEN_BYTES
            raise disk_full(error, path, expected + hdf5.METADATA_BYTES) or error from None
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
    with _opened(Path(path), wait_s) as source:
        head = _read_head(source, run_id, verify)
        chosen = list(range(head.num_rows)) if rows is None else list(rows)
        if chosen and not (0 <= min(chosen) and max(chosen) < head.num_rows):
            raise ShardError(f"row {max(chosen, key=abs)} was asked for, it has {head.num_rows}")
        tokens = _Tokens.of(head, chosen)
        # The trajectories are views: made while the disk still works.
        trajectories = make_trajectories(head, tokens.arrays, chosen, [tokens.starts[row] for row in chosen])
        tokens.fill(source, head)
        if verify:
            _check_tokens(head, tokens)
        return trajectories


@_again
def read_index(
    path: str | Path, *, run_id: str | None = None, verify: bool = True, wait_s: float = 0.0
) -> ShardInfo:
    """What `commit` returned for this shard, from the file alone. Raises ShardError.

    Without `verify` the tokens are not read: a few milliseconds whatever the size.
    """
    with _opened(Path(path), wait_s, whole=verify) as source:
        head = _read_head(source, run_id, verify)
        if verify:
            tokens = _Tokens.of(head, range(head.num_rows))
            tokens.fill(source, head)
            _check_tokens(head, tokens)
        return ShardInfo(Path(path), hdf5.text(source.file, "digest"), head.rows(), source.num_bytes)


@_again
def read_head(path: str | Path) -> tuple[ShardHead, str]:
    """Everything of a shard but its tokens, and the digest, which holds for what is returned.

    For walks over many shards. Raises ShardError and FileNotFoundError.
    """
    with _opened(Path(path), 0.0, whole=False) as source:
        return _read_head(source, None, True), hdf5.text(source.file, "digest")


def quarantine(path: Path, folder: Path, reason: str) -> Path:
    """Move a damaged shard out of the spool; warns with its name. Returns where it lies now."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"{path.parent.name}-{path.name}"
    os.rename(path, target)
    logging.getLogger(__name__).warning("quarantined damaged shard %s as %s: %s", path, target, reason)
    return target


# ---- writing ---------------------------------------------------------------------------


def _write(
    path: Path, trajectories: Sequence[Trajectory], run_id: str, writer_rank: int, helper: ThreadPoolExecutor
) -> tuple[ShardHead, int]:
    """Write and sync the file; returns its head and size.

    `helper` sends the tokens to the disk, at the places that HDF5 will give them; meanwhile
    this thread computes their checksums and has the file laid out. HDF5 itself writes only its
    own structures, into space that is reserved before: when these meet a full disk HDF5 may
    crash the process.
    """
    labels = make_labels(trajectories)
    num_reserved = hdf5.metadata_bytes(len(labels.stored))
    start = hdf5.first_place(num_reserved)
    tokens = [getattr(trajectory, name) for name in TOKEN_ARRAYS for trajectory in trajectories]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        sending = helper.submit(_gather, descriptor, tokens, start)
        try:
            # The checksums first: the other steps would wait for the tokens on their way into the file.
            head = make_head(trajectories, labels, run_id, writer_rank)
            write_all(descriptor, hdf5.empty_file())
            os.posix_fallocate(descriptor, 0, start)
            with hdf5.opened(path, num_reserved) as file:
                places = hdf5.lay_out(file, head.num_rows, head.num_tokens, len(labels.part_names))
                hdf5.set_attributes(file, _attributes(head))
        finally:
            wait([sending])  # nothing may write to a descriptor that is closed
        sending.result()
        for name in TOKEN_ARRAYS:
            if places[name] != start:
                raise RuntimeError(f"HDF5 put {name} of {path} at {places[name]}, expected at {start}")
            start += head.num_tokens * hdf5.KINDS[name].itemsize
        for name, array in head.arrays.items():
            _write_at(descriptor, memoryview(array.tobytes()), places[name])
        os.fsync(descriptor)
        return head, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _attributes(head: ShardHead) -> dict[str, str | int]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": head.run_id,
        "writer_rank": head.writer_rank,
        "labels": head.labels.stored,
        "digest": head.digest(),
    }


def _gather(descriptor: int, arrays: list[np.ndarray], place: int) -> None:
    """Write arrays one after the other from `place` on, without joining them first, and start their transfer."""
    for first in range(0, len(arrays), MAX_GATHER):
        pieces = [
            array if array.flags.c_contiguous else np.ascontiguousarray(array)
            for array in arrays[first : first + MAX_GATHER]
        ]
        end = place + sum([piece.nbytes for piece in pieces])
        place += os.pwritev(descriptor, pieces, place)
        if place < end:  # the system took a part only: the rest in one piece
            _write_at(descriptor, memoryview(b"".join(pieces))[place - end :], place)
            place = end
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_at(descriptor: int, rest: memoryview, place: int) -> None:
    while rest:
        place += (count := os.pwrite(descriptor, rest, place))
        rest = rest[count:]


# ---- reading ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """An open shard: HDF5's view of it, and the descriptor that its datasets are read through."""

    file: hdf5.FileID
    descriptor: int
    num_bytes: int

    def read(self, name: str, array: np.ndarray, place: int) -> None:
        """Fill `array` with the bytes from `place` on; ShardError where the file ends before."""
        view = memoryview(array).cast("B") if array.size else memoryview(b"")
        while view:
            count = os.preadv(self.descriptor, [view], place)
            if not count:
                raise ShardError(f"it ends within {name}")
            view, place = view[count:], place + count

    def find(self, name: str, count: int | None = None) -> tuple[int, int]:
        """As `hdf5.find`; ShardError where the file ends before the dataset does, too."""
        place, found = hdf5.find(self.file, name, count)
        if place + found * hdf5.KINDS[name].itemsize > self.num_bytes:
            raise ShardError(f"it ends within {name}")
        return place, found

    def whole(self, name: str, count: int | None = None) -> np.ndarray:
        """All of a dataset, one-dimensional."""
        place, found = self.find(name, count)
        array = np.empty(found, hdf5.KINDS[name])
        self.read(name, array, place)
        return array


@contextmanager
def _opened(path: Path, wait_s: float, *, whole: bool = True) -> Iterator[_Source]:
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
        num_bytes = os.fstat(descriptor).st_size
        # The head lies at both ends: asked for first, it is there while the disk still works on the tokens.
        num_front, num_back = FRONT_BYTES, num_bytes // BACK_SHARE + FRONT_BYTES
        os.posix_fadvise(descriptor, 0, num_front, os.POSIX_FADV_WILLNEED)
        os.posix_fadvise(descriptor, max(num_bytes - num_back, 0), num_back, os.POSIX_FADV_WILLNEED)
        if whole:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        with hdf5.opened(path) as file:
            yield _Source(file, descriptor, num_bytes)
    except (ShardError, OSError, RuntimeError, KeyError, TypeError) as error:
        # HDF5 answers damage with any of these, depending on the layer that trips over it.
        raise ShardError(f"shard {path} is not readable: {' '.join(str(error).split())[:300]}") from error
    finally:
        os.close(descriptor)


def _read_head(source: _Source, run_id: str | None, verify: bool) -> ShardHead:
    """Everything but the tokens; ShardError for another schema, another run or what does not fit."""
    file = source.file
    if not hdf5.has_attribute(file, "schema_version"):
        raise ShardError("no shard of this project: it has no schema_version")
    schema_version = hdf5.integer(file, "schema_version")
    if schema_version != SCHEMA_VERSION:
        raise ShardError(f"schema version {schema_version}, this program reads {SCHEMA_VERSION}")
    found = hdf5.text(file, "run_id")
    if run_id is not None and found != run_id:
        raise ShardError(f"it belongs to run {found!r}, not to {run_id!r}")
    labels = Labels.parse(hdf5.text(file, "labels"))
    table = source.whole("trajectories")
    parts = source.whole("reward_parts", len(table) * len(labels.part_names))
    head = ShardHead(
        run_id=found,
        writer_rank=hdf5.integer(file, "writer_rank"),
        labels=labels,
        trajectories=table,
        offsets=source.whole("offsets", len(table) + 1),
        reward_parts=parts.reshape(len(table), len(labels.part_names)),
    )
    head.check()
    if verify and head.digest() != (stored := hdf5.text(file, "digest")):
        raise ShardError(f"its digest is {head.digest()[:16]}, the file says {stored[:16]}")
    return head


@dataclass(frozen=True)
class _Tokens:
    """Where the per-token arrays of some rows come from and go to."""

    arrays: dict[str, np.ndarray]
    starts: dict[int, int]
    """Row -> where it starts in `arrays`."""
    pieces: list[tuple[int, int]]
    """Half-open runs of elements of each dataset that fill `arrays`, one after the other."""

    @staticmethod
    def of(head: ShardHead, rows: Sequence[int]) -> _Tokens:
        """Room for these rows, still to be filled."""
        pieces = []
        starts: dict[int, int] = {}
        length = 0
        for first, last in _pieces(rows):
            begin, end = int(head.offsets[first]), int(head.offsets[last])
            starts |= zip(range(first, last), (head.offsets[first:last] - begin + length).tolist(), strict=True)
            pieces.append((begin, end))
            length += end - begin
        return _Tokens({name: np.empty(length, hdf5.KINDS[name]) for name in TOKEN_ARRAYS}, starts, pieces)

    def fill(self, source: _Source, head: ShardHead) -> None:
        """Read the arrays."""
        for name, array in self.arrays.items():
            place, _ = source.find(name, head.num_tokens)
            position = 0
            for begin, end in self.pieces:
                part = array[position : position + end - begin]
                source.read(name, part, place + begin * array.itemsize)
                position += end - begin


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


def _check_tokens(head: ShardHead, tokens: _Tokens) -> None:
    lengths, checksums = head.trajectories["num_tokens"].tolist(), head.trajectories["checksum"].tolist()
    in_order = [tokens.arrays[name] for name in ("tokens", "loss_mask", "rollout_logprobs", "versions")]
    for row, start in tokens.starts.items():
        if token_checksum(*(array[start : start + lengths[row]] for array in in_order)) != checksums[row]:
            raise ShardError(f"the tokens of row {row} do not have the checksum that was written with them")
