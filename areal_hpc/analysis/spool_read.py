"""Walks the spool of a run, finished or running: one shard at a time, heads before tokens.

Shards may appear or go to quarantine while this reads: what has its final name is whole,
and a shard that left for the quarantine is left out. Damage is collected, never raised.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from areal_hpc.analysis.spool_filter import Filter
from areal_hpc.config.errors import ConfigError
from areal_hpc.paths import RunPaths
from areal_hpc.spool.schema import ShardError, ShardHead
from areal_hpc.spool.shard import SUFFIX, read_head


@dataclass(frozen=True)
class Selected:
    """A shard with the rows that a filter keeps: `rows` [K], indices into the head's table."""

    path: Path
    name: str
    """Relative to the run folder."""
    head: ShardHead
    digest: str
    num_bytes: int
    rows: np.ndarray

    @property
    def table(self) -> np.ndarray:
        """[K] rows of `spool.schema.TABLE`."""
        return self.head.trajectories[self.rows]


@dataclass
class Spool:
    """The shards of the run in `root`. `damaged`: what could not be read in the walks so far, by name."""

    root: Path
    damaged: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = self.root.expanduser().resolve()
        self.paths = RunPaths(self.root)
        if not self.paths.spool.is_dir():
            raise ConfigError(f"RUN={str(self.root)!r} holds no folder spool/: give the folder of a run")

    def shards(self) -> list[Path]:
        """Files that are there now, by writer and time."""
        return sorted(path for path in self.paths.spool.glob(f"*/*{SUFFIX}") if not path.name.startswith("."))

    def quarantined(self) -> list[str]:
        """Names of damaged shards that the run has put aside."""
        return sorted(self.paths.relative(path) for path in self.paths.quarantine.glob(f"*{SUFFIX}"))

    def walk(self, kept: Filter | None = None) -> Iterator[Selected]:
        """Every shard that holds a row of `kept`, in the order of `shards`; heads only are read."""
        for path in self.shards():
            selected = self.select(path, kept)
            if selected is not None and len(selected.rows):
                yield selected

    def select(self, path: Path, kept: Filter | None = None) -> Selected | None:
        """One shard's head and the rows that are kept; None where it is damaged or gone."""
        name = self.paths.relative(path)
        try:
            head, digest = read_head(path)
            num_bytes = os.path.getsize(path)
        except FileNotFoundError:
            self.missing(path)
            return None
        except (ShardError, OSError) as error:
            self.damaged[name] = str(error)
            return None
        rows = np.arange(head.num_rows) if kept is None else np.flatnonzero(kept.mask(head.trajectories))
        return Selected(path, name, head, digest, num_bytes, rows)

    def missing(self, path: Path) -> None:
        """A shard was listed or journaled and is not there: fine only if it went to quarantine."""
        if not (self.paths.quarantine / f"{path.parent.name}-{path.name}").exists():
            name = self.paths.relative(path)
            self.damaged[name] = f"shard {path} is gone, and not in quarantine"
