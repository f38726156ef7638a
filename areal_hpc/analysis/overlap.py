"""Spans of one rank that may lie over one another, made exclusive: of two, the stronger counts.

An engine that has nothing to generate may get new weights meanwhile: that time is the
update's, not the idleness's, and is counted once. Used by `timeline` for rollouts. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MAX_PARTS = 100_000
"""Parts that are remembered: a span that lies over more of them is as if those had not been."""


class Part(NamedTuple):
    """A stretch of time (seconds since the epoch) that belongs to one span."""

    begin: float
    end: float
    strength: int
    activity: str
    why: str = ""
    """What an idle span waited for."""


class Exclusive:
    """Whose each moment is. Spans come about in the order of their ends, as telemetry writes them."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque(maxlen=MAX_PARTS)

    def put(self, span: Part) -> list[tuple[Part, Part | None]]:
        """What the span gets: (part of it, the weaker part that gives it up; None if it was nobody's)."""
        touched: list[Part] = []
        while self._parts and self._parts[-1].end > span.begin:
            touched.append(self._parts.pop())
        gained: list[tuple[Part, Part | None]] = []
        at = span.begin

        def gain(begin: float, end: float, before: Part | None = None) -> None:
            if begin < end:
                part = span._replace(begin=begin, end=end)
                gained.append((part, before))
                self._parts.append(part)

        for part in reversed(touched):
            low, high = max(part.begin, span.begin), min(part.end, span.end)
            gain(at, min(low, span.end))
            if part.strength < span.strength and low < high:
                self._keep(part._replace(end=low))
                gain(low, high, part)
                self._keep(part._replace(begin=high))
            else:
                self._keep(part)
            at = max(at, high)
        gain(at, span.end)
        return gained

    def _keep(self, part: Part) -> None:
        if part.begin < part.end:
            self._parts.append(part)
