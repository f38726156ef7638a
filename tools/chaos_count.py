"""What a run lost and what it trained twice, counted from its files alone.

Shares no code with the program: the journal is parsed as lines of `<checksum> <JSON>`, the
shards are read with h5py. `tools/chaos.py` believes these counts.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import h5py


@dataclass(frozen=True)
class Count:
    """In trajectories. answered_again: those made a second time although the first lay whole in the spool."""

    trained: int
    lost: int
    trained_twice: int
    answered_again: int
    waiting: int


def read_journal(path: Path) -> list[dict]:
    """Every whole record; a torn last line is left out."""
    records = []
    for line in path.read_bytes().splitlines(keepends=True):
        checksum, _, body = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
            break
        records.append(json.loads(body))
    return records


def read_spool(folder: Path) -> dict[int, list[set[int]]]:
    """group id -> for each readable shard that holds the group, which of its samples."""
    found: dict[int, list[set[int]]] = defaultdict(list)
    for path in sorted(folder.glob("rollout-*/*.h5")):
        members: dict[int, set[int]] = defaultdict(set)
        with h5py.File(path, "r") as file:
            table = file["trajectories"]
            for group, sample in zip(table["group_id"].tolist(), table["sample_index"].tolist(), strict=True):
                members[group].add(sample)
        for group, samples in members.items():
            found[group].append(samples)
    return found


def surviving_steps(records: list[dict]) -> dict[int, list[int]]:
    """training step -> its groups, in the history that the last attempt stands on."""
    steps: dict[int, list[int]] = {}
    for record in records:
        if record["k"] == "run":
            steps = {step: groups for step, groups in steps.items() if step <= record["train_step"]}
        elif record["k"] == "consumed":
            steps[record["train_step"]] = record["groups"]
        elif record["k"] == "unconsumed":
            steps.pop(record["train_step"], None)
    return steps


def count(run: Path, group_size: int, *, finished: bool) -> Count:
    """`finished`: the run has ended, so that nothing may wait for its training any more.

    Lost is, of a run under way, a group that was trained according to the journal without
    ever being in the spool; of a finished one also each group that was asked for, or lies
    whole in the spool, and was neither trained nor given up for a reason in the journal.
    """
    records = read_journal(run / "ledger.jsonl")
    spool = read_spool(run / "spool")
    whole = {group for group, copies in spool.items() if any(len(copy) == group_size for copy in copies)}
    times = Counter(group for groups in surviving_steps(records).values() for group in groups)
    given_up = {
        group for record in records if record["k"] in ("dropped", "discarded") for group in record["groups"]
    }
    admitted = {record["group"] for record in records if record["k"] == "admitted"}
    lost = times.keys() - whole
    waiting = (admitted | whole) - times.keys() - given_up
    if finished:
        lost, waiting = lost | waiting, set()
    again = sum(max(0, sum(len(copy) == group_size for copy in copies) - 1) for copies in spool.values())
    return Count(
        trained=len(times) * group_size,
        lost=len(lost) * group_size,
        trained_twice=sum(number - 1 for number in times.values()) * group_size,
        answered_again=again * group_size,
        waiting=len(waiting) * group_size,
    )
