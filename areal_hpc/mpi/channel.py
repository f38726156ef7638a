"""Typed messages between ranks: send, poll, receive with a deadline.

Two transports share one class: MPI (`MpiTransport`) and an in-process twin for tests
(`LocalNetwork`). Nothing here blocks inside MPI: MPICH spins in a blocking call and would
take a core from the engine, so waiting means probing with short sleeps.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from areal_hpc.messages import Alive, Message, decode, encode

if TYPE_CHECKING:
    from mpi4py import MPI

POLL_INTERVAL_S = 0.001
MAX_POLL_INTERVAL_S = 0.01
POLL_SHARE = 0.01
"""A wait looks again after this share of what it has lasted: late by 1% of it, and cheap for the
cores that somebody else computes on."""
TAG = 7


class Envelope(NamedTuple):
    """A message and the world rank that sent it."""

    source: int
    message: Message


class Transport(Protocol):
    """Moves bytes between world ranks; order is kept per pair of ranks."""

    def send(self, dest: int, data: bytes) -> None: ...

    def receive(self) -> tuple[int, bytes] | None:
        """The next message that has arrived, or None at once."""
        ...

    def pending(self) -> int:
        """Sends that have not left yet."""
        ...

    def settle(self, deadline_s: float) -> list[int]:
        """See `Channel.settle`; returns the ranks whose messages did not all arrive."""
        ...


class Channel:
    """One rank's end of the message world. Threads may share it."""

    def __init__(self, transport: Transport, describe: Callable[[int], str] = "rank {}".format) -> None:
        self._transport = transport
        self._describe = describe
        self._lock = threading.Lock()
        self._stash: deque[Envelope] = deque()
        self._heard: set[int] = set()

    def send(self, dest: int, message: Message) -> None:
        """Hand over a message; returns at once."""
        data = encode(message)
        with self._lock:
            self._transport.send(dest, data)

    def poll(self, limit: int = 256) -> list[Envelope]:
        """Up to `limit` messages that have arrived, oldest first."""
        with self._lock:
            self._pull(limit - len(self._stash))
            return [self._stash.popleft() for _ in range(min(limit, len(self._stash)))]

    def receive(
        self,
        kinds: type[Message] | tuple[type[Message], ...],
        deadline_s: float,
        what: str,
        source: int | None = None,
    ) -> Envelope:
        """The next message of one of `kinds` (from `source` if given).

        Other messages stay for later polls, in order. Raises TimeoutError that names
        `what` and whom it waited for after `deadline_s` seconds.
        """
        begin = time.monotonic()
        while True:
            with self._lock:
                self._pull(256)
                for index, envelope in enumerate(self._stash):
                    if isinstance(envelope.message, kinds) and source in (None, envelope.source):
                        del self._stash[index]
                        return envelope
            waited = time.monotonic() - begin
            if waited > deadline_s:
                whom = "any rank" if source is None else self._describe(source)
                raise TimeoutError(f"waited {deadline_s:.0f} s for {what} from {whom}")
            time.sleep(min(MAX_POLL_INTERVAL_S, max(POLL_INTERVAL_S, POLL_SHARE * waited)))

    def heard(self) -> set[int]:
        """World ranks from which anything has arrived since the last call."""
        with self._lock:
            self._pull(4096)
            heard, self._heard = self._heard, set()
            return heard

    def settle(self, deadline_s: float) -> None:
        """Collective, after every rank's last send: wait until nothing is under way, drop what comes.

        MPI_Finalize fails on a message that nobody received, such as a last report to a
        controller that has stopped listening. TimeoutError names whose messages are missing.
        """
        with self._lock:
            missing = self._transport.settle(deadline_s)
        if missing:
            names = ", ".join(map(self._describe, missing))
            raise TimeoutError(f"waited {deadline_s:.0f} s for the last messages of {names}")

    def _pull(self, limit: int) -> None:
        for _ in range(limit):
            arrived = self._transport.receive()
            if arrived is None:
                return
            source, data = arrived
            self._heard.add(source)
            message = decode(data)
            if not isinstance(message, Alive):
                self._stash.append(Envelope(source, message))


class MpiTransport:
    """Bytes over a communicator of its own; called under the channel's lock only."""

    def __init__(self, communicator: MPI.Comm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = communicator
        self._requests: deque[tuple[MPI.Request, bytes]] = deque()
        self._num_sent = array("q", [0] * communicator.Get_size())
        self._num_received = array("q", self._num_sent)

    def send(self, dest: int, data: bytes) -> None:
        self._retire()
        self._num_sent[dest] += 1
        request = self._comm.Isend([data, self._mpi.BYTE], dest=dest, tag=TAG)
        self._requests.append((request, data))

    def receive(self) -> tuple[int, bytes] | None:
        status = self._mpi.Status()
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, TAG, status)
        if message is None:
            return None
        buffer = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([buffer, self._mpi.BYTE])
        self._num_received[status.Get_source()] += 1
        return status.Get_source(), bytes(buffer)

    def pending(self) -> int:
        self._retire()
        return len(self._requests)

    def settle(self, deadline_s: float) -> list[int]:
        # How many to wait for only the senders know: the counts make it exact, a barrier would not.
        num_coming = array("q", [0] * len(self._num_sent))
        told = self._comm.Ialltoall([self._num_sent, self._mpi.INT64_T], [num_coming, self._mpi.INT64_T])
        end = time.monotonic() + deadline_s
        while True:
            while self.receive() is not None:
                pass
            if told.Test() and num_coming == self._num_received and not self.pending():
                return []
            if time.monotonic() > end:
                ranks = range(len(num_coming))
                return [rank for rank in ranks if num_coming[rank] != self._num_received[rank]] or list(ranks)
            time.sleep(POLL_INTERVAL_S)

    def _retire(self) -> None:
        # A send may finish out of order (another peer was slow): look at each once.
        for _ in range(len(self._requests)):
            entry = self._requests.popleft()
            if not entry[0].Test():
                self._requests.append(entry)


class LocalNetwork:
    """`size` ranks in one process, for tests of loops without MPI."""

    def __init__(self, size: int) -> None:
        self._queues: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]

    def channel(self, rank: int) -> Channel:
        return Channel(_LocalTransport(self._queues, rank))


class _LocalTransport:
    def __init__(self, queues: list[deque[tuple[int, bytes]]], rank: int) -> None:
        self._queues = queues
        self._rank = rank

    def send(self, dest: int, data: bytes) -> None:
        self._queues[dest].append((self._rank, data))

    def receive(self) -> tuple[int, bytes] | None:
        queue = self._queues[self._rank]
        return queue.popleft() if queue else None

    def pending(self) -> int:
        return 0

    def settle(self, deadline_s: float) -> list[int]:
        self._queues[self._rank].clear()
        return []
