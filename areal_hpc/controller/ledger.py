"""The run's journal: writing it and reading it back. `recovery` draws the conclusions.

One writer, append only. A line is `<crc32 of the JSON> <JSON>\\n`; records are gathered
over a turn of the controller's loop and synced together before anything that follows from
them is sent. A torn last line is cut; a damaged line elsewhere is an error that names it.

Kinds and their fields:
    run         attempt, train_step (the checkpoint it goes on from), data, config (digests),
                settings (every key of the configuration), first_group (of the present prompts),
                batch_size, group_size, max_staleness, num_prompts, time,
                counters (of the attempts before)
    admitted    group, epoch, version (served)
    committed   path, digest, groups [{group, epoch, rows}]; newest_version where the attempt before wrote it
                (`surviving`)
    unfinished  path, digest, groups (as committed)     saved at a stop, to go on with
    continued   group, path, rows, version      granted with these rows of an unfinished shard
    dropped     groups, reason                  given up: their places went back
    discarded   groups, train_step, reason      finished but not trained
    damaged     path, groups, reason            their shard cannot be read: answered again
    consumed    train_step, version, groups     sent to the trainer
    unconsumed  train_step                      the trainer could not read that batch
    live        version                         every engine serves it
    checkpoint  train_step, path
    eval        train_step, accuracy
    stop        state, reason, train_step
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from areal_hpc.durable import disk_full, open_own, write_all

log = logging.getLogger(__name__)

CHECKSUM_BYTES = 8
"""Hexadecimal digits at the start of a line."""


class LedgerError(RuntimeError):
    """The journal is damaged before its end."""


class Ledger:
    """The writer's end. `add` gathers, `sync` makes what was gathered last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_own(path, os.O_WRONLY | os.O_APPEND)
        self._pending: list[bytes] = []

    def add(self, kind: str, **fields: object) -> None:
        body = msgspec.json.encode({"k": kind, **fields})
        self._pending.append(b"%08x %s\n" % (zlib.crc32(body), body))

    def sync(self) -> None:
        """Raises DiskFullError naming the journal and the bytes missing."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        before = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError as error:
            # Leave no half record: what was not synced was not promised to anybody.
            os.ftruncate(self._descriptor, before)
            raise disk_full(error, self._path, len(data)) or error from None
        self._pending = []

    def close(self) -> None:
        self.sync()
        os.close(self._descriptor)


def read_ledger(path: Path, *, repair: bool = False) -> Iterator[dict]:
    """All whole records, one after the other, in bounded memory.

    A record that was not finished at the end of the file is left out, and with `repair`
    cut off. Raises LedgerError for damage before the end.
    """
    if not path.exists():
        return
    good = 0
    with open(path, "rb") as file:
        for line in file:
            record = parse_line(line)
            if record is None:
                rest = [line, *file]
                if any(parse_line(other) is not None for other in rest):
                    raise LedgerError(f"{path} is damaged at byte {good}, before its end")
                log.warning("%s: cut %d bytes of a record that was not finished", path, sum(map(len, rest)))
                if repair:
                    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as journal:
                        journal.truncate(good)
                return
            yield record
            good += len(line)


def read_runs(path: Path) -> Iterator[dict]:
    """The `run` record of each attempt; the torn record of a kill does not count."""
    if not path.exists():
        return
    begun = b'{"k":"run",'
    with open(path, "rb") as file:
        for line in file:
            # Without a look into the other records: there may be millions of them.
            if line.startswith(begun, CHECKSUM_BYTES + 1) and (record := parse_line(line)) is not None:
                yield record


def num_attempts(path: Path) -> int:
    """How often the run was begun, from its journal."""
    return sum(1 for _ in read_runs(path))


def last_run(path: Path) -> dict | None:
    """The newest attempt's `run` record, None before the first."""
    found = None
    for found in read_runs(path):
        pass
    return found


def parse_line(line: bytes) -> dict | None:
    """The record of a whole line, else None."""
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    try:
        if not line.endswith(b"\n") or len(checksum) != CHECKSUM_BYTES or int(checksum, 16) != zlib.crc32(body):
            return None
        return json.loads(body)
    except ValueError:
        return None
