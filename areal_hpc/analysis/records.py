"""Lines of JSON from files that somebody may still be writing, or was when it was killed.

Used by every tool that reads a run folder: a missing file is empty, and a line that is cut
short or damaged is left out. Reading is line by line, in memory that does not grow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE_BYTES = 1 << 22
"""A longer line is no record of this program."""
TAIL_BYTES = 64 * 1024

_decode = msgspec.json.Decoder().decode


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole JSON objects of a file, one a line, in order."""
    try:
        stream = open(path, "rb")
    except OSError:
        return
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            record = parse(line)
            if record is not None:
                yield record


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Whole JSON objects within the last `num_bytes` of a file."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - num_bytes))
            lines = stream.read(num_bytes).splitlines()
    except OSError:
        return []
    return [record for line in lines if (record := parse(line)) is not None]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is none that can be read."""
    try:
        return parse(path.read_bytes()) or {}
    except OSError:
        return {}


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`, None if it is none."""
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Python writes NaN and Infinity, which are no JSON; all but a few lines take the fast way.
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return record if isinstance(record, dict) else None


def number(record: dict[str, Any], name: str, default: float = 0.0) -> float:
    """A numeric field; `default` where it is missing or something else."""
    value = record.get(name, default)
    return float(value) if isinstance(value, (int, float)) else default
