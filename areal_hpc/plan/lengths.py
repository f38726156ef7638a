"""How long answers are: a long-tailed distribution, or the lengths of a measured run.

The simulation draws whole groups, because a group is trained on when its last answer is
there, and answers to one prompt resemble each other: hard prompts get long answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

SIGMA = 1.0
"""Spread of log-length: the longest of a thousand answers is over ten times the mean."""
PROMPT_SHARE = 0.5
"""Part of the variance of log-length that belongs to the prompt, not to the answer."""


class Lengths(Protocol):
    """Lengths of answers, tokens."""

    max_tokens: int
    mean: float
    mean_square: float

    def sample(self, rng: np.random.Generator, group_size: int) -> list[int]: ...


@dataclass(frozen=True)
class LogNormal:
    """Log-normal answers of mean `mean` after they are cut at `max_tokens`."""

    mean: float
    max_tokens: int
    sigma: float = SIGMA
    prompt_share: float = PROMPT_SHARE

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.max_tokens:
            raise ValueError(f"mean answer of {self.mean:g} tokens must lie between 1 and {self.max_tokens}")

    @cached_property
    def mu(self) -> float:
        """Location of the uncut distribution, so that the cut one has the wanted mean."""
        if not self.sigma:
            return math.log(self.mean)
        low, high = math.log(self.mean), math.log(self.max_tokens) + 8 * self.sigma
        low -= self.sigma**2  # the mean of a log-normal lies sigma^2 / 2 above exp(mu)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._moment(middle, 1) < self.mean else (low, middle)
        return (low + high) / 2

    @property
    def mean_square(self) -> float:
        return self._moment(self.mu, 2) if self.sigma else self.mean**2

    def _moment(self, mu: float, power: int) -> float:
        """E[min(X, max_tokens)^power]."""
        cut = (math.log(self.max_tokens) - mu) / self.sigma
        body = math.exp(power * mu + (power * self.sigma) ** 2 / 2) * _normal_cdf(cut - power * self.sigma)
        return body + self.max_tokens**power * (1 - _normal_cdf(cut))

    def sample(self, rng: np.random.Generator, group_size: int) -> list[int]:
        prompt = rng.standard_normal() * math.sqrt(self.prompt_share)
        answers = rng.standard_normal(group_size) * math.sqrt(1 - self.prompt_share)
        lengths = np.exp(self.mu + self.sigma * (prompt + answers))
        return np.clip(np.rint(lengths), 1, self.max_tokens).astype(int).tolist()


class Empirical:
    """Groups of a measured run, drawn with replacement."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        if not groups or not all(groups):
            raise ValueError("no measured answers")
        self._groups = [np.asarray(group) for group in groups]
        every = np.concatenate(self._groups).astype(float)
        self.max_tokens = int(every.max())
        self.mean = float(every.mean())
        self.mean_square = float((every**2).mean())

    def sample(self, rng: np.random.Generator, group_size: int) -> list[int]:
        """A measured group; filled up or cut by drawing from it where the size differs."""
        group = self._groups[rng.integers(len(self._groups))]
        if len(group) == group_size:
            return group.tolist()
        return rng.choice(group, group_size, replace=len(group) < group_size).tolist()


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))
