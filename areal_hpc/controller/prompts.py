"""The order in which prompts are asked: every prompt once an epoch, shuffled by seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from areal_hpc.types import Prompt


@dataclass(frozen=True)
class NextPrompt:
    """`ordinal` counts prompts over all epochs; it is the group_id of the group made from it."""

    ordinal: int
    epoch: int
    prompt: Prompt


class PromptCursor:
    """A position in an endless (or `epochs` long) sequence of prompts; the position is its whole state."""

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, epochs: int, position: int = 0, first: int = 0
    ) -> None:
        """`epochs` 0 is endless. `first`: where these prompts begin, a multiple of their number."""
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._end = first + epochs * len(prompts) if epochs else None
        self.position = position
        self._orders: dict[int, list[int]] = {}

    @property
    def num_prompts(self) -> int:
        """Of one epoch."""
        return len(self._prompts)

    @property
    def exhausted(self) -> bool:
        return self._end is not None and self.position >= self._end

    def peek(self) -> NextPrompt | None:
        """The next prompt, or None at the end of the last epoch."""
        return None if self.exhausted else self.at(self.position)

    def advance(self) -> None:
        self.position += 1

    def at(self, ordinal: int) -> NextPrompt:
        """The prompt of any position: what a resumed run asks again."""
        epoch, place = divmod(ordinal, len(self._prompts))
        return NextPrompt(ordinal, epoch, self._prompts[self._order(epoch)[place]])

    def epoch_closed(self, epoch: int) -> bool:
        """Whether every prompt of the epoch has been taken."""
        return self.position >= (epoch + 1) * len(self._prompts)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"prompts of seed {self._seed}, epoch {epoch}").shuffle(order)
            # Around the end of an epoch two are in use at once.
            self._orders = {other: kept for other, kept in self._orders.items() if other >= epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]
