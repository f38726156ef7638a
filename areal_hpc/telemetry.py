"""Spans and counters of one rank, written to its own JSONL file; and log set-up.

Each line is one JSON object. A span: {"t": start, "d": seconds, "s": name, ...attributes};
a counter or gauge: {"t": time, "c": name, "v": value}; both with "a", the number of the
attempt, once that is known: a resumed run goes on in the same file and repeats steps. Times
are seconds since the epoch (`time.time`), so that the files of one allocation share a clock
base. The writer buffers and never raises into the run: a full disk stops telemetry, not
training. What a line costs: tools/bench_telemetry.py.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from areal_hpc.durable import disk_full, open_own, write_all

FLUSH_INTERVAL_S = 1.0
MAX_BYTES = 256 * 1024 * 1024
"""A file stops growing here; the last line says so."""


class Telemetry:
    """Append-only event file of one rank. Threads may share one.

    attempt: which attempt at the run the lines belong to, 0 while that is not known.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, attempt: int = 0) -> None:
        self.attempt = attempt
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(path, os.O_RDWR | os.O_APPEND)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._size = os.fstat(descriptor).st_size
        self._max_bytes = max_bytes
        self._buffer: list[bytes] = []
        if self._size and os.pread(descriptor, 1, self._size - 1) != b"\n":
            # A killed writer left half a line: only that one shall be lost.
            self._buffer.append(b"\n")
        self._last_flush = time.monotonic()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def span(self, name: str, **attributes: object) -> Iterator[dict[str, object]]:
        """Record how long the body took; attributes may be added to the yielded dict."""
        start, clock = time.time(), time.perf_counter()
        try:
            yield attributes
        finally:
            self.record_span(name, start, time.perf_counter() - clock, **attributes)

    def record_span(self, name: str, start: float, seconds: float, **attributes: object) -> None:
        self._write({"t": round(start, 6), "d": round(seconds, 6), "s": name, **attributes})

    def value(self, name: str, value: float, **attributes: object) -> None:
        """Record a counter or gauge reading."""
        self._write({"t": round(time.time(), 6), "c": name, "v": value, **attributes})

    def _write(self, event: dict[str, object]) -> None:
        if self.attempt:
            event["a"] = self.attempt
        line = _encode(event)
        with self._lock:
            if self._closed:
                return
            self._buffer.append(line)
            if time.monotonic() - self._last_flush >= FLUSH_INTERVAL_S:
                self._flush()

    def flush(self) -> None:
        with self._lock:
            if not self._closed:
                self._flush()

    def _flush(self) -> None:
        text, self._buffer = b"".join(self._buffer), []
        self._last_flush = time.monotonic()
        if not text or self._size >= self._max_bytes:
            return
        self._size += len(text)
        if self._size >= self._max_bytes:
            text += _encode({"t": time.time(), "c": "telemetry.full", "v": self._size})
        try:
            write_all(self._file.fileno(), text)
        except OSError as error:
            logging.getLogger(__name__).warning("telemetry stopped: %s", error)
            self._size = self._max_bytes

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._flush()
                self._closed = True
                try:
                    self._file.close()
                except OSError:
                    pass


def _encode(event: dict[str, object]) -> bytes:
    """One line. msgspec takes a tenth of json's time, but not every string and number."""
    try:
        return msgspec.json.encode(event, enc_hook=_plain) + b"\n"
    except (ValueError, TypeError, OverflowError):
        return json.dumps(event, default=str).encode() + b"\n"


def _plain(value: object) -> object:
    """A number of numpy as Python's; whatever else JSON does not know as text."""
    return value.item() if hasattr(value, "item") else str(value)


def append_jsonl(path: Path, record: dict[str, object]) -> None:
    """Append one JSON object as a line, private to the user; the file has one writer.

    Raises DiskFullError, leaving no part of the line, when there is no space.
    """
    data = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    try:
        descriptor = open_own(path, os.O_WRONLY | os.O_APPEND)
        before = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, data)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise disk_full(error, path, len(data)) or error from None


def replace_json(path: Path, record: dict[str, object]) -> None:
    """Write a JSON file so that a reader sees the old or the new one, never a part.

    Raises DiskFullError, leaving no temporary file behind, when there is no space.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(record)
    try:
        descriptor = open_own(temporary, os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_full(error, path, len(text)) or error from None


def setup_logging(log_file: Path | None, *, label: str, verbose: bool = False) -> None:
    """Send this process's log records, stdout of libraries included, to its own file.

    The file descriptors 1 and 2 are pointed at the log, so that lines of C libraries and
    child processes land there too; the caller keeps a duplicate of the terminal if it
    needs one.
    """
    level = logging.DEBUG if verbose else logging.INFO
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(log_file, os.O_WRONLY | os.O_APPEND)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    logging.basicConfig(
        level=level,
        format=f"%(asctime)s {label} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
