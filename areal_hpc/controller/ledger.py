"""The run's journal and what a restart reads from it.

One writer, append only. A line is `<crc32 of the JSON> <JSON>\\n`; records are gathered
over a turn of the controller's loop and synced together before anything that follows from
them is sent. A torn last line is cut; a damaged line elsewhere is an error that names it.

Kinds: run (an attempt begins at a checkpoint's step), admitted, committed, dropped,
discarded, consumed (at a step), live (version served), checkpoint, eval, stop.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from areal_hpc.controller.batcher import ReadyGroup
from areal_hpc.durable import disk_full, write_all
from areal_hpc.types import ShardRow

log = logging.getLogger(__name__)


class LedgerError(RuntimeError):
    """The journal is damaged before its end."""


class Ledger:
    """The writer's end. `add` gathers, `sync` makes what was gathered last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pending: list[bytes] = []

    def add(self, kind: str, **fields: object) -> None:
        body = msgspec.json.encode({"k": kind, **fields})
        self._pending.append(b"%08x %s\n" % (zlib.crc32(body), body))

    def sync(self) -> None:
        """Raises DiskFullError naming the journal and the bytes missing."""
        if not self._pending:
            return
        data, self._pending = b"".join(self._pending), []
        before = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError as error:
            # Leave no half record: what was not synced was not promised to anybody.
            os.ftruncate(self._descriptor, before)
            raise disk_full(error, self._path, len(data)) or error from None

    def close(self) -> None:
        self.sync()
        os.close(self._descriptor)


def read_ledger(path: Path, *, repair: bool = False) -> list[dict]:
    """All whole records. A torn tail is left out, and with `repair` cut off the file."""
    if not path.exists():
        return []
    records: list[dict] = []
    good = 0
    data = path.read_bytes()
    while good < len(data):
        end = data.find(b"\n", good)
        record = None if end < 0 else _parse(data[good:end])
        if record is None:
            if 0 <= end < len(data) - 1 and any(map(_parse, data[end + 1 :].split(b"\n"))):
                raise LedgerError(f"{path} is damaged at byte {good}, before its end")
            log.warning("%s: cut %d bytes of a record that was not finished", path, len(data) - good)
            if repair:
                os.truncate(path, good)
            break
        records.append(record)
        good = end + 1
    return records


def _parse(line: bytes) -> dict | None:
    checksum, _, body = line.partition(b" ")
    try:
        if len(checksum) != 8 or int(checksum, 16) != zlib.crc32(body):
            return None
        return json.loads(body)
    except ValueError:
        return None


@dataclass
class Recovered:
    """State of a run at a checkpoint, with everything committed since.

    ready: groups that the surviving history has not consumed. in_flight: group ids that
    were admitted and have no result. attempt: how often the run was started before.
    """

    position: int = 0
    attempt: int = 0
    data_digest: str = ""
    config_digest: str = ""
    ready: dict[int, ReadyGroup] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    consumed: dict[int, int] = field(default_factory=dict)
    """group id -> training step, surviving history only."""
    num_returned: int = 0
    """Groups consumed after the checkpoint: available again."""


def recover(records: list[dict], train_step: int) -> Recovered:
    """What a run that goes on from the checkpoint of `train_step` finds. Pure.

    Groups consumed at later steps are available again, because the weights that learnt
    from them are lost; a group is consumed at most once in the history that survives.
    """
    state = Recovered()
    admitted: set[int] = set()
    committed: dict[int, ReadyGroup] = {}
    gone: set[int] = set()
    for record in records:
        kind = record["k"]
        if kind == "run":
            state.attempt = record["attempt"]
            state.data_digest, state.config_digest = record["data_digest"], record["config_digest"]
            state.consumed = _up_to(state.consumed, record["train_step"])
        elif kind == "admitted":
            admitted.add(record["group"])
            state.position = max(state.position, record["group"] + 1)
        elif kind == "committed":
            for group in record["groups"]:
                rows = tuple(msgspec.convert(row, ShardRow) for row in group["rows"])
                committed[group["group"]] = ReadyGroup(group["group"], group["epoch"], record["path"], rows)
        elif kind in ("dropped", "discarded"):
            gone.update(record["groups"])
        elif kind == "lost":
            for group in record["groups"]:
                committed.pop(group, None)
        elif kind == "consumed":
            state.consumed |= dict.fromkeys(record["groups"], record["train_step"])
    before = len(state.consumed)
    state.consumed = _up_to(state.consumed, train_step)
    state.num_returned = before - len(state.consumed)
    state.ready = {
        group_id: group
        for group_id, group in committed.items()
        if group_id not in state.consumed and group_id not in gone
    }
    state.in_flight = sorted(admitted - committed.keys() - gone - state.consumed.keys())
    return state


def _up_to(consumed: dict[int, int], train_step: int) -> dict[int, int]:
    return {group: step for group, step in consumed.items() if step <= train_step}
