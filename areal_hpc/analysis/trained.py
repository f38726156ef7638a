"""What was trained, sample by sample, summed up per step: from the journal, in bounded memory.

The journal is read twice. The first pass finds which groups the surviving history has
trained, at which step; the second adds their rows, one shard after the other, to sums and
counts of that step. Nothing here is a mean of means: a mean is made of sums at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.analysis.history import JOURNAL_PREFIX
from areal_hpc.controller.ledger import parse_line
from areal_hpc.controller.surviving import SurvivingVersions
from areal_hpc.types import ALL_VERSIONS, distinct_version

FREQUENT = (b'{"k":"admitted"', b'{"k":"committed"')
"""Kinds that the first pass leaves out without a look: nearly all of a journal."""
STARTS = (b'{"k":"run"',)


@dataclass
class StepSums:
    """Sums and counts over the samples of one training step; lengths in tokens of the answer."""

    num_samples: int = 0
    num_tokens: int = 0
    """Prompts included."""
    num_answer_tokens: int = 0
    longest: int = 0
    num_truncated: int = 0
    reward: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    """Versions between training and a sample's oldest token -> samples."""
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, row: dict[str, Any], version: int, newest: int = ALL_VERSIONS) -> None:
        """One row of the journal, trained from `version`; `newest` as in `types.distinct_version`."""
        answer = row["num_loss_tokens"]
        self.num_samples += 1
        self.num_tokens += row["num_tokens"]
        self.num_answer_tokens += answer
        self.longest = max(self.longest, answer)
        self.num_truncated += row["finish_reason"] == "length"
        self.reward += row["reward"]
        self.lengths[bucket(answer)] += 1
        if answer:
            oldest = min(row["min_version"], distinct_version(row["max_version"], newest))
            self.staleness[version - oldest] += 1


@dataclass
class Trained:
    """`steps` by training step; `step_of`: group -> (step, version trained from)."""

    steps: dict[int, StepSums] = field(default_factory=dict)
    step_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_admitted: int = 0
    num_discarded: int = 0
    num_dropped: int = 0
    num_damaged: int = 0
    num_answer_tokens_committed: int = 0
    """Answer tokens of all committed groups, trained or not."""
    damaged_at: int = -1
    """Byte at which the journal is damaged; -1 if it is whole (a torn end is whole)."""

    @property
    def total(self) -> StepSums:
        """All steps together."""
        found = StepSums()
        for step in self.steps.values():
            for name in ("num_samples", "num_tokens", "num_answer_tokens", "num_truncated", "reward"):
                setattr(found, name, getattr(found, name) + getattr(step, name))
            found.longest = max(found.longest, step.longest)
            found.staleness += step.staleness
            found.lengths += step.lengths
        return found


def bucket(length: int) -> int:
    """Lengths are counted exactly up to 64 tokens, above that in steps of about 3 %."""
    if length <= 64:
        return length
    return round(64 * 1.03 ** round(math.log(length / 64, 1.03)))


def quantile(counts: Counter[int], share: float) -> float:
    """The value that `share` of the counted samples do not exceed; 0 for none."""
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * total:
            return float(value)
    return 0.0


def load_step_of(ledger: Path, last_step: int) -> dict[int, tuple[int, int]]:
    """The first pass alone: group -> (training step, version trained from)."""
    return _first_pass(ledger, last_step)[0].step_of


def _first_pass(ledger: Path, last_step: int) -> tuple[Trained, set[tuple[str, int]], SurvivingVersions]:
    """What the rare records say; (shard, group) of what was damaged and answered again; and the newest
    surviving version of each attempt, whose number stands for all of its shards."""
    result, surviving, attempt = Trained(), SurvivingVersions(), 0
    lost: set[tuple[str, int]] = set()
    for record in _records(ledger, result, skip=FREQUENT):
        _follow(result, record, lost)
        if record["k"] == "run":
            attempt += 1
            surviving.take(record)
            surviving.take({"k": "committed", "path": str(attempt)})
    result.step_of = {group: entry for group, entry in result.step_of.items() if entry[0] <= last_step}
    return result, lost, surviving


def load_trained(ledger: Path, last_step: int) -> Trained:
    """Sum up a journal; groups of steps after `last_step` were sent to the trainer and have not come back."""
    result, lost, surviving = _first_pass(ledger, last_step)
    steps: dict[int, StepSums] = {}
    attempt = 0
    for record in _records(ledger, result, only=FREQUENT + STARTS):
        if record["k"] == "admitted":
            result.num_admitted += 1
            continue
        if record["k"] == "run":
            attempt += 1
            continue
        newest = min(surviving.newest(str(attempt)), record.get("newest_version", ALL_VERSIONS))
        for group in record["groups"]:
            result.num_answer_tokens_committed += sum(row["num_loss_tokens"] for row in group["rows"])
            entry = result.step_of.get(group["group"])
            if entry is None or (record["path"], group["group"]) in lost:
                continue
            sums = steps.setdefault(entry[0], StepSums())
            for row in group["rows"]:
                sums.add(row, entry[1], newest)
    result.steps = dict(sorted(steps.items()))
    return result


def _follow(result: Trained, record: dict[str, Any], lost: set[tuple[str, int]]) -> None:
    match record["k"]:
        case "run":
            first = record["train_step"]
            result.step_of = {group: entry for group, entry in result.step_of.items() if entry[0] <= first}
        case "consumed":
            result.step_of |= dict.fromkeys(record["groups"], (record["train_step"], record["version"]))
        case "unconsumed":
            step = record["train_step"]
            result.step_of = {group: entry for group, entry in result.step_of.items() if entry[0] != step}
        case "damaged":
            result.num_damaged += len(record["groups"])
            for group in record["groups"]:
                lost.add((record["path"], group))
                result.step_of.pop(group, None)
        case "dropped":
            result.num_dropped += len(record["groups"])
        case "discarded":
            result.num_discarded += len(record["groups"])


def _records(
    ledger: Path, result: Trained, *, skip: tuple[bytes, ...] = (), only: tuple[bytes, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Records whose line begins as `only` says, or not as `skip` says, up to the first damage."""
    try:
        stream = open(ledger, "rb")
    except OSError:
        return
    with stream:
        place = 0
        for line in stream:
            chosen = line.startswith(only, JOURNAL_PREFIX) if only else not line.startswith(skip, JOURNAL_PREFIX)
            if chosen:
                record = parse_line(line)
                if record is None:
                    # A line without its end is one that was being written.
                    result.damaged_at = place if line.endswith(b"\n") else result.damaged_at
                    return
                yield record
            place += len(line)
