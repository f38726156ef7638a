"""Slurm's compressed host lists: `nodeA,nodeB[001,003],rack[0-1]_blade[08-11]`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_HOSTS = 200_000
"""A list that grows beyond this is a damaged one."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> list[str]:
    """Host names in the order they are written; ValueError for what is not a host list."""
    hosts: list[str] = []
    for item in _split(text):
        names = [""]
        for piece in re.split(r"(\[[^\[\]]*\])", item):
            parts = list(_numbers(piece[1:-1], text)) if piece.startswith("[") else [piece]
            if len(names) * len(parts) + len(hosts) > MAX_HOSTS:
                raise ValueError(f"host list {text!r} names more than {MAX_HOSTS} hosts")
            names = [name + part for name in names for part in parts]
        if any("[" in name or "]" in name or not name for name in names):
            raise ValueError(f"host list {text!r} is malformed at {item!r}")
        hosts += names
    return hosts


def _split(text: str) -> Iterator[str]:
    """Items between the commas outside brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"host list {text!r} has unbalanced brackets")
        if character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if depth:
        raise ValueError(f"host list {text!r} has unbalanced brackets")
    if text.strip():
        yield text[start:].strip()


def _numbers(inside: str, text: str) -> Iterator[str]:
    """`001,003-005` -> 001 003 004 005; the first number's width holds for its range."""
    for item in inside.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"host list {text!r} is malformed at [{inside}]")
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) < int(low):
            raise ValueError(f"host list {text!r} counts backwards at [{inside}]")
        if int(high) - int(low) >= MAX_HOSTS:
            raise ValueError(f"host list {text!r} names more than {MAX_HOSTS} hosts")
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))
