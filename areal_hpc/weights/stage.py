"""Memory between a rollout rank and its engine's workers: staged weights, and a word about them.

The rank owns it (memfds: nothing lies in a file system, nothing stays when the rank
ends), workers map it by path. `TransferControl` is how a transfer in the background is
followed and cancelled without a call into the busy engine. Imports no vLLM.
"""

from __future__ import annotations

import os
import struct

_HEAD = struct.Struct("<qqI")
"""Last attempt that was cancelled, last attempt that ended, length of its error text."""
CONTROL_BYTES = 4096


class Stage:
    """Host memory of this process under a path that its child processes can open."""

    def __init__(self, name: str, num_bytes: int = 0) -> None:
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._size = 0
        self.reserve(num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Room for at least `num_bytes`; what lies there stays."""
        if num_bytes > self._size:
            os.ftruncate(self._descriptor, num_bytes)
            self._size = num_bytes

    def close(self) -> None:
        os.close(self._descriptor)


class TransferControl:
    """A small shared record. The rank writes `cancel`, one worker writes `end`; both may read."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR)

    def cancel(self, attempt: int) -> None:
        """Ask for the end of every transfer up to `attempt`."""
        os.pwrite(self._descriptor, struct.pack("<q", attempt), 0)

    def is_cancelled(self, attempt: int) -> bool:
        return self._head()[0] >= attempt

    def end(self, attempt: int, error: str) -> None:
        """The transfer is over: everything is staged, or `error` says why not."""
        text = error.encode("utf-8", "replace")[: CONTROL_BYTES - _HEAD.size]
        os.pwrite(self._descriptor, text, _HEAD.size)
        # The attempt goes last: who reads it finds the text in place.
        os.pwrite(self._descriptor, struct.pack("<I", len(text)), 16)
        os.pwrite(self._descriptor, struct.pack("<q", attempt), 8)

    def outcome(self, attempt: int) -> str | None:
        """None while the transfer runs; then "" or its error."""
        _, ended, length = self._head()
        if ended != attempt:
            return None
        return os.pread(self._descriptor, length, _HEAD.size).decode("utf-8", "replace")

    def _head(self) -> tuple[int, int, int]:
        return _HEAD.unpack(os.pread(self._descriptor, _HEAD.size, 0))

    def close(self) -> None:
        os.close(self._descriptor)
