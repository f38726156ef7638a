"""`areal-hpc spool export RUN -o FILE`: trajectories as Parquet or JSON lines.

Shard by shard, so that memory does not grow with the run; the file gets its name when it
is whole. Columns: shard, row, group_id, prompt_id, sample_index, reward, reward_parts,
finish_reason, num_tokens, num_loss_tokens, min_version, max_version; with tokens also
tokens, loss_mask, rollout_logprobs, versions (lists); with text also text, response.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from areal_hpc.analysis.spool_filter import Filter
from areal_hpc.analysis.spool_list import report_damage
from areal_hpc.analysis.spool_read import Selected, Spool
from areal_hpc.analysis.spool_text import Decode
from areal_hpc.config.errors import ConfigError
from areal_hpc.durable import disk_full
from areal_hpc.spool.schema import TOKEN_ARRAYS, ShardError
from areal_hpc.spool.shard import read_rows
from areal_hpc.types import Trajectory

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl"}
TABLE_COLUMNS = ("group_id", "prompt_id", "sample_index", "reward", "num_tokens", "num_loss_tokens", "min_version",
                 "max_version")  # fmt: skip


def format_of(output: str, wanted: str | None) -> str:
    """The format by option, else by the file's ending. Raises ConfigError."""
    if wanted is None and Path(output).suffix not in FORMATS:
        raise ConfigError(f"--output={output} ends in neither {' nor '.join(FORMATS)}: give --format")
    found = wanted or FORMATS[Path(output).suffix]
    if output == "-" and found == "parquet":
        raise ConfigError("--output=- takes --format jsonl: Parquet cannot be written to a pipe")
    return found


def export_spool(
    spool: Spool,
    kept: Filter,
    output: str,
    form: str,
    *,
    with_tokens: bool = True,
    decode: Decode | None = None,
) -> int:
    """Write what is kept; returns 1 if a shard could not be read (all others are written), else 0."""
    num_rows = num_shards = 0
    with _target(output) as target, _SINKS[form](target.path, with_tokens, decode is not None) as sink:
        for selected in spool.walk(kept):
            try:
                # Tokens are read whenever something of them is written, and verified then.
                whole = with_tokens or decode is not None
                trajectories = read_rows(selected.path, selected.rows.tolist(), verify=True) if whole else []
            except FileNotFoundError:
                spool.missing(selected.path)
                continue
            except (ShardError, OSError) as error:
                spool.damaged[selected.name] = str(error)
                continue
            target.next_bytes = _about_bytes(selected, with_tokens)
            sink.write(selected, trajectories, _texts(trajectories, decode))
            num_rows += len(selected.rows)
            num_shards += 1
    print(f"wrote {num_rows:,} trajectories of {num_shards:,} shards to {output}", file=sys.stderr)
    return report_damage(spool)


@dataclass
class _Target:
    """`path` to write to ("-": the pipe); `next_bytes`: about the size of what is being written to it."""

    path: str
    next_bytes: int = 1


@contextmanager
def _target(output: str) -> Iterator[_Target]:
    """Where to write: the pipe, or a file that gets its name at the end. Raises ConfigError, DiskFullError."""
    if output == "-":
        yield _Target(output)
        return
    path = Path(output)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--output={output} must be a file in a folder that exists")
    target = _Target(str(temporary))
    try:
        yield target
        os.replace(temporary, path)
    except OSError as error:
        if full := disk_full(error, path, target.next_bytes):
            raise full from None
        raise ConfigError(f"--output={output} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _about_bytes(selected: Selected, with_tokens: bool) -> int:
    """Size of a shard's rows in the spool; what they take in the file is of that order."""
    table = selected.table
    row_bytes = sum(table.dtype[name].itemsize for name in TABLE_COLUMNS)
    token_bytes = sum(np.dtype(kind).itemsize for kind in TOKEN_ARRAYS.values()) if with_tokens else 0
    return len(table) * row_bytes + int(table["num_tokens"].sum()) * token_bytes


def _texts(trajectories: list[Trajectory], decode: Decode | None) -> list[tuple[str, str]]:
    """(whole text, text of the policy's tokens) of each."""
    if decode is None:
        return []
    return [
        (decode(trajectory.tokens), decode(trajectory.tokens[trajectory.loss_mask != 0]))
        for trajectory in trajectories
    ]


class _Sink(Protocol):
    def __enter__(self) -> _Sink: ...

    def __exit__(self, *error: object) -> None: ...

    def write(self, selected: Selected, trajectories: list[Trajectory], texts: Sequence[tuple[str, str]]) -> None: ...


class _JsonLines:
    """One object a line."""

    def __init__(self, path: str, with_tokens: bool, with_text: bool) -> None:
        self._with_tokens = with_tokens
        self._stream = sys.stdout if path == "-" else open(path, "w", encoding="utf-8")

    def __enter__(self) -> _JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not sys.stdout:
            self._stream.close()

    def write(self, selected: Selected, trajectories: list[Trajectory], texts: Sequence[tuple[str, str]]) -> None:
        labels, table = selected.head.labels, selected.table
        columns = [table[name].tolist() for name in (*TABLE_COLUMNS, "finish_reason")]
        parts = selected.head.reward_parts[selected.rows].tolist()
        for index, (row, values, *fields) in enumerate(zip(selected.rows.tolist(), parts, *columns, strict=True)):
            record: dict[str, Any] = {
                "shard": selected.name,
                "row": row,
                **dict(zip(TABLE_COLUMNS, fields[:-1], strict=True)),
                "finish_reason": labels.finish_reasons[fields[-1]],
                "reward_parts": dict(zip(labels.part_names, values, strict=True)),
            }
            if self._with_tokens:
                record |= {name: getattr(trajectories[index], name).tolist() for name in TOKEN_ARRAYS}
            if texts:
                record["text"], record["response"] = texts[index]
            self._stream.write(json.dumps(record) + "\n")


class _Parquet:
    """A row group a shard."""

    def __init__(self, path: str, with_tokens: bool, with_text: bool) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._pa, self._with_tokens = pa, with_tokens
        numbers = {"<i8": pa.int64(), "<i4": pa.int32(), "<f4": pa.float32(), "|u1": pa.uint8()}
        head = {"reward": pa.float32(), "group_id": pa.int64(), "prompt_id": pa.int64()}
        fields = [("shard", pa.string()), ("row", pa.int32())]
        fields += [(name, head.get(name, pa.int32())) for name in TABLE_COLUMNS]
        fields += [("finish_reason", pa.string()), ("reward_parts", pa.map_(pa.string(), pa.float32()))]
        if with_tokens:
            fields += [(name, pa.list_(numbers[kind])) for name, kind in TOKEN_ARRAYS.items()]
        if with_text:
            fields += [("text", pa.string()), ("response", pa.string())]
        self._schema = pa.schema(fields)
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def __enter__(self) -> _Parquet:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def write(self, selected: Selected, trajectories: list[Trajectory], texts: Sequence[tuple[str, str]]) -> None:
        pa, table, labels = self._pa, selected.table, selected.head.labels
        parts = selected.head.reward_parts[selected.rows]
        columns: dict[str, Any] = {
            "shard": [selected.name] * len(table),
            "row": selected.rows.astype(np.int32),
            **{name: np.ascontiguousarray(table[name]) for name in TABLE_COLUMNS},
            "finish_reason": np.array(labels.finish_reasons, object)[table["finish_reason"]],
            "reward_parts": [list(zip(labels.part_names, values, strict=True)) for values in parts.tolist()],
        }
        if self._with_tokens:
            ends = np.cumsum([trajectory.num_tokens for trajectory in trajectories])
            offsets = pa.array(np.r_[0, ends].astype(np.int32))
            for name in TOKEN_ARRAYS:
                flat = np.concatenate([getattr(trajectory, name) for trajectory in trajectories])
                columns[name] = pa.ListArray.from_arrays(offsets, pa.array(flat))
        if texts:
            columns["text"], columns["response"] = map(list, zip(*texts, strict=True))
        self._writer.write_table(pa.table(columns, schema=self._schema))


_SINKS = {"parquet": _Parquet, "jsonl": _JsonLines}
