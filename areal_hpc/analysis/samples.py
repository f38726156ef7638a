"""Trajectories of the spool as a report shows them: the best and the worst as text.

Reads a bounded number of shards, spread evenly over the run, and of each a bounded number
of rows, whatever the size of the spool. Tokens become text with the run's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from areal_hpc.analysis.history import History
from areal_hpc.analysis.spool_text import Decode, load_decoder, printable
from areal_hpc.analysis.trained import Trained
from areal_hpc.config.errors import ConfigError
from areal_hpc.types import Trajectory

MAX_SHARDS = 256
MAX_ROWS = 128
"""Rows read of one shard."""
NUM_SHOWN = 3
MAX_CHARS = 3000
"""Characters shown of one stretch of a text."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one origin: `prompt`, `answer` (the policy's) or `given` (tool output, feedback)."""

    origin: str
    text: str


@dataclass(frozen=True)
class Shown:
    """One trajectory to be printed."""

    step: int
    group: int
    sample: int
    reward: float
    parts: dict[str, float]
    num_tokens: int
    finish_reason: str
    versions: tuple[int, int]
    stretches: tuple[Stretch, ...]


@dataclass
class Samples:
    """The chosen trajectories, and how much of the spool was read for them."""

    best: list[Shown] = field(default_factory=list)
    worst: list[Shown] = field(default_factory=list)
    num_read: int = 0
    num_shards_read: int = 0
    num_shards: int = 0
    unreadable: int = 0
    decoded: bool = True
    """False where no tokenizer was found: texts are token ids."""


def load_samples(history: History, trained: Trained) -> Samples:
    """Sample the spool of a run; only trained trajectories count."""
    from areal_hpc.spool.shard import ShardError, read_rows

    found = Samples()
    shards = sorted(history.paths.spool.glob("*/*.h5"))
    found.num_shards = len(shards)
    best: list[tuple[tuple[float, int, int], Trajectory, int]] = []
    worst: list[tuple[tuple[float, int, int], Trajectory, int]] = []
    for path in spread(shards, MAX_SHARDS):
        try:
            rows = _rows_of(path)
            trajectories = read_rows(path, rows)
        except (ShardError, OSError):
            found.unreadable += 1
            continue
        found.num_shards_read += 1
        for trajectory in trajectories:
            entry = trained.step_of.get(trajectory.group_id)
            if entry is None:
                continue
            found.num_read += 1
            # Of equal rewards the newest: it shows what the policy does now.
            rank = (trajectory.reward, entry[0], -trajectory.sample_index)
            best = _keep(best, rank, trajectory, entry[0])
            worst = _keep(worst, (-trajectory.reward, *rank[1:]), trajectory, entry[0])
    decoder = find_decoder(history)
    found.decoded = decoder is not None
    decode = decoder or (lambda ids: " ".join(map(str, ids)))
    found.best = [show(trajectory, step, decode) for _, trajectory, step in best]
    lowest = best[-1][1].reward if best else 0.0
    found.worst = [show(trajectory, step, decode) for _, trajectory, step in worst if trajectory.reward < lowest]
    return found


def _rows_of(path: Path) -> list[int]:
    """Rows to read of a shard: the tokens of a few, whatever its size."""
    from areal_hpc.spool.shard import read_index

    return spread(range(len(read_index(path, verify=False).rows)), MAX_ROWS)


def spread(items: Iterable, most: int) -> list:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    items = list(items)
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _keep(kept: list, rank: tuple, trajectory: Trajectory, step: int) -> list:
    """The NUM_SHOWN highest of different groups."""
    if len(kept) == NUM_SHOWN and rank <= kept[-1][0]:
        return kept
    others = [entry for entry in kept if entry[1].group_id != trajectory.group_id or entry[0] > rank]
    if any(entry[1].group_id == trajectory.group_id for entry in others):
        return kept
    return sorted([*others, (rank, trajectory, step)], key=lambda entry: entry[0], reverse=True)[:NUM_SHOWN]


def show(trajectory: Trajectory, step: int, decode: Decode) -> Shown:
    """A trajectory in stretches of text."""
    mask = trajectory.loss_mask.astype(bool)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), trajectory.num_tokens]
    stretches = []
    for begin, end in zip(edges, edges[1:]):
        origin = "answer" if mask[begin] else "given" if begin else "prompt"
        text = printable(decode(trajectory.tokens[begin:end].tolist()), newlines=True)
        if len(text) > MAX_CHARS:
            half = MAX_CHARS // 2
            text = f"{text[:half]} … ({len(text) - MAX_CHARS} characters left out) … {text[-half:]}"
        stretches.append(Stretch(origin, text))
    trained = trajectory.versions[mask]
    return Shown(
        step=step, group=trajectory.group_id, sample=trajectory.sample_index, reward=trajectory.reward,
        parts=trajectory.reward_parts, num_tokens=trajectory.num_loss_tokens, finish_reason=trajectory.finish_reason,
        versions=(int(trained.min()), int(trained.max())) if trained.size else (-1, -1), stretches=tuple(stretches),
    )  # fmt: skip


def find_decoder(history: History) -> Decode | None:
    """The run's tokenizer: where the configuration says, else beside the weights that the run exported."""
    for place in (None, *sorted(history.paths.exports.glob("step-*"), reverse=True)):
        try:
            return load_decoder(history.paths, None if place is None else str(place))
        except ConfigError:
            continue
    return None
