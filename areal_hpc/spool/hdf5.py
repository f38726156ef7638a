"""The HDF5 side of a spool shard: where its datasets lie in the file, and its attributes.

HDF5 decides the places and writes its own structures; the bytes of the datasets go to
these places and come from them past it. The low-level API of h5py with types and property
lists that are made once: it takes a third of the time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

# Network filesystems often refuse HDF5's advisory locks; whole files behind an atomic rename
# need none. The library reads this when it is loaded, hence before the import of h5py.
os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"
from h5py import h5a, h5d, h5f, h5p, h5s, h5t  # noqa: E402

from areal_hpc.spool.schema import HEAD_ARRAYS, TOKEN_ARRAYS, ShardError  # noqa: E402

FileID = h5f.FileID
METADATA_BYTES = 8 * 1024
"""More than HDF5's own structures take in a shard, the labels aside."""
STEP_BYTES = 4096
KINDS = {name: np.dtype(kind) for name, kind in TOKEN_ARRAYS.items()} | HEAD_ARRAYS
"""Name -> numpy's type of each dataset."""


def metadata_bytes(label_bytes: int) -> int:
    """What HDF5 shall set aside for its structures in a shard whose labels take `label_bytes`."""
    return METADATA_BYTES + -(-2 * label_bytes // STEP_BYTES) * STEP_BYTES


@functools.cache
def empty_file() -> bytes:
    """The bytes of an HDF5 file with nothing in it."""
    access = _access(2048).copy()
    access.set_fapl_core(STEP_BYTES, False)
    file = h5f.create(b"empty", h5f.ACC_TRUNC, None, access)
    try:
        h5f.flush(file)
        return file.get_file_image()
    finally:
        file.close()


@functools.cache
def first_place(reserved: int) -> int:
    """Where `lay_out` begins in an empty file that sets `reserved` bytes aside, tried out in memory.

    Known before, the bytes can be on their way to the disk while HDF5 still works.
    """
    access = _access(reserved).copy()
    access.set_fapl_core(STEP_BYTES, False)
    access.set_file_image(empty_file())
    file = h5f.open(b"empty", h5f.ACC_RDWR, access)
    try:
        return _create(file, "tokens", h5s.create_simple((1,)))
    finally:
        file.close()


@contextmanager
def opened(path: str | os.PathLike[str], reserved: int | None = None) -> Iterator[FileID]:
    """The HDF5 file `path`, to write into where `reserved` bytes are set aside, else to read."""
    flags = h5f.ACC_RDONLY if reserved is None else h5f.ACC_RDWR
    file = h5f.open(os.fsencode(path), flags, _access(reserved or 2048))
    try:
        yield file
    finally:
        file.close()


def lay_out(file: FileID, num_rows: int, num_tokens: int, num_parts: int) -> dict[str, int]:
    """Create the datasets; returns where in the file the bytes of each belong.

    Those of TOKEN_ARRAYS come first, one after the other from `first_place` on.
    """
    shapes = {name: (num_tokens,) for name in TOKEN_ARRAYS}
    shapes |= {"trajectories": (num_rows,), "offsets": (num_rows + 1,), "reward_parts": (num_rows, num_parts)}
    spaces = {shape: h5s.create_simple(shape) for shape in set(shapes.values())}
    return {name: _create(file, name, spaces[shape]) for name, shape in shapes.items()}


def set_attributes(file: FileID, attributes: Mapping[str, str | int]) -> None:
    for name, value in attributes.items():
        stored = np.array(value.encode() if isinstance(value, str) else value)
        kind = _type(stored.dtype)
        h5a.create(file, name.encode(), kind, _scalar()).write(stored, kind)


def has_attribute(file: FileID, name: str) -> bool:
    return h5a.exists(file, name.encode())


def text(file: FileID, name: str) -> str:
    attribute = h5a.open(file, name.encode())
    return _value(attribute, np.dtype(f"S{attribute.get_storage_size()}")).decode()


def integer(file: FileID, name: str) -> int:
    return _value(h5a.open(file, name.encode()), np.dtype("<i8"))


def find(file: FileID, name: str, count: int | None = None) -> tuple[int, int]:
    """Where the bytes of a dataset begin in the file, and how many elements it has.

    ShardError if it has another type than the shard's, not `count` elements (None: any)
    or lies in pieces.
    """
    dataset = h5d.open(file, name.encode())
    if not dataset.get_type().equal(_type(KINDS[name])):
        raise ShardError(f"{name} has the type {dataset.dtype}")
    place, found = dataset.get_offset(), dataset.get_storage_size() // KINDS[name].itemsize
    if count is not None and found != count:
        raise ShardError(f"{name} has the shape {dataset.shape}, its head says {count} elements")
    if place is None and found:
        raise ShardError(f"{name} does not lie in one piece")
    return place or 0, found


def _create(file: FileID, name: str, space: h5s.SpaceID) -> int:
    return h5d.create(file, name.encode(), _type(KINDS[name]), space, _placed()).get_offset()


def _value(attribute: h5a.AttrID, kind: np.dtype) -> bytes | int:
    value = np.empty((), kind)
    attribute.read(value, _type(kind))
    return value.item()


@functools.lru_cache(maxsize=256)
def _type(kind: np.dtype) -> h5t.TypeID:
    return h5t.py_create(kind)


@functools.cache
def _scalar() -> h5s.SpaceID:
    return h5s.create(h5s.SCALAR)


@functools.cache
def _placed() -> h5p.PropDCID:
    """Of datasets that get a place at once and are never filled: their bytes are written past HDF5."""
    created = h5p.create(h5p.DATASET_CREATE)
    created.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    created.set_fill_time(h5d.FILL_TIME_NEVER)
    return created


@functools.cache
def _access(reserved: int) -> h5p.PropFAID:
    """`reserved`: HDF5's own structures are put together in pieces of that size."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_LATEST, h5f.LIBVER_LATEST)
    access.set_meta_block_size(reserved)
    # Closing the file closes it, even while a dataset object (or a traceback) is still alive.
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    return access
