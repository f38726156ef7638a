"""Which trajectories of a spool: bounds on reward, versions, prompt, group and length.

Pure numpy on the tables of `spool.schema`; nothing but a shard's head is needed. Used by
every `areal-hpc spool` command; `add_arguments` puts the options into a parser.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np

from areal_hpc.config.errors import ConfigError

FORMS = "N, A..B, A.., ..B, >=N, >N, <=N or <N"
_SIGNS = ("<=", ">=", "<", ">")


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`; an open end does not hold its bound."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, values: np.ndarray) -> np.ndarray:
        """[N] bool: which of `values` lie inside."""
        return self.meets(values, values)

    def meets(self, lowest: np.ndarray, highest: np.ndarray) -> np.ndarray:
        """[N] bool: which of the ranges lowest..highest have a number inside."""
        # numpy compares in the stored type: a reward of 0.9 is the float32 that is nearest to 0.9.
        above = highest > self.low if self.low_open else highest >= self.low
        below = lowest < self.high if self.high_open else lowest <= self.high
        return above & below


def parse_interval(option: str, text: str, *, whole: bool) -> Interval:
    """An interval from one of FORMS; `whole` takes integers only. Raises ConfigError."""

    def number(part: str) -> float:
        try:
            value = int(part) if whole else float(part)
        except ValueError:
            kind = "whole numbers" if whole else "numbers"
            raise ConfigError(f"{option}={text!r} is no bound on {kind}: write {FORMS}") from None
        if math.isnan(value):
            raise ConfigError(f"{option}={text!r} is no bound: write {FORMS}")
        return value

    stripped = text.strip()
    first, dots, last = stripped.partition("..")
    if dots:
        low = number(first) if first else -math.inf
        high = number(last) if last else math.inf
        if low > high:
            raise ConfigError(f"{option}={text!r} is empty: the first bound must not be above the second")
        return Interval(low, high)
    sign = next((sign for sign in _SIGNS if stripped.startswith(sign)), "")
    value = number(stripped.removeprefix(sign))
    low = -math.inf if sign.startswith("<") else value
    high = math.inf if sign.startswith(">") else value
    return Interval(low, high, low_open=sign == ">", high_open=sign == "<")


@dataclass(frozen=True)
class Filter:
    """A trajectory is kept if every interval that is given holds."""

    reward: Interval | None = None
    version: Interval | None = None
    """Some trained token is of such a version."""
    prompt: Interval | None = None
    group: Interval | None = None
    length: Interval | None = None
    """Trained tokens, prompt and observations not counted."""

    def mask(self, table: np.ndarray) -> np.ndarray:
        """[N] bool over rows of `spool.schema.TABLE`."""
        kept = np.ones(len(table), bool)
        columns = {
            "reward": self.reward,
            "prompt_id": self.prompt,
            "group_id": self.group,
            "num_loss_tokens": self.length,
        }
        for name, interval in columns.items():
            if interval is not None:
                kept &= interval.holds(table[name])
        if self.version is not None:
            # Rows without a trained token have no version.
            kept &= self.version.meets(table["min_version"], table["max_version"]) & (table["num_loss_tokens"] > 0)
        return kept


OPTIONS = {
    "reward": ("reward", False),
    "version": ("policy version of some trained token", True),
    "prompt": ("prompt id", True),
    "group": ("group id", True),
    "length": ("trained tokens", True),
}
"""Option -> (what it bounds, whether it takes integers only)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("filters", f"each is {FORMS}; all must hold")
    for name, (meaning, _) in OPTIONS.items():
        group.add_argument(f"--{name}", metavar="BOUND", help=meaning)


def make_filter(arguments: argparse.Namespace) -> Filter:
    """The filter of parsed options. Raises ConfigError for a bound that cannot be read."""
    given = {name: getattr(arguments, name) for name in OPTIONS}
    return Filter(
        **{
            name: parse_interval(f"--{name}", text, whole=OPTIONS[name][1])
            for name, text in given.items()
            if text is not None
        }
    )
