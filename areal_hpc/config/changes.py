"""What differs between two configurations of one run: a resumed run says and journals it."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from areal_hpc.config.schema import Config

HOW_NOT_WHAT = {"run.on_existing", "run.take_over", "run.verbose"}
"""Keys that say how a run is started, not what it computes."""


def settings(config: Config) -> dict[str, Any]:
    """Every leaf by its dotted key, as plain values."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for entry in dataclasses.fields(node):
            value, key = getattr(node, entry.name), prefix + entry.name
            if dataclasses.is_dataclass(value):
                walk(value, key + ".")
            elif key not in HOW_NOT_WHAT:
                found[key] = value.value if isinstance(value, Enum) else value

    walk(config, "")
    return found


def describe_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """"algorithm.clip_eps 0.2 -> 0.3" for each key that differs, in the order of the schema."""
    keys = dict.fromkeys([*after, *before])
    missing = object()
    changed = [key for key in keys if before.get(key, missing) != after.get(key, missing)]
    return [f"{key} {before.get(key, 'unset')} -> {after.get(key, 'unset')}" for key in changed]
