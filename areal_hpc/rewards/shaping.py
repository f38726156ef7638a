"""Rewards for the shape of an answer: `format` (does it match a pattern) and `length`.

Run in reward workers. Meant as small weights beside a reward for being right.
"""

from __future__ import annotations

import functools
import re

from areal_hpc.rewards.extract import last_boxed
from areal_hpc.rewards.registry import per_sample, sees_truncated
from areal_hpc.types import Prompt


@per_sample
def format_reward(prompt: Prompt, response: str, *, pattern: str = "") -> float:
    """1.0 if the response has the wanted form, else 0.0.

    pattern: a regular expression that the stripped response must match as a whole
    (`.` matches line ends); "" asks for a last \\boxed{} that is closed and not empty.
    """
    if not pattern:
        return 1.0 if last_boxed(response) else 0.0
    return 1.0 if _compiled(pattern).fullmatch(response.strip()) else 0.0


@functools.lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


@sees_truncated
@per_sample
def length_reward(prompt: Prompt, response: str, *, target: int = 1000, limit: int = 2000) -> float:
    """0.0 up to `target` characters, falling in a straight line to -1.0 at `limit` and beyond."""
    if not 0 <= target < limit:
        raise ValueError(f"options target={target} and limit={limit} must satisfy 0 <= target < limit")
    excess = (len(response) - target) / (limit - target)
    return min(0.0, max(-1.0, -excess))
