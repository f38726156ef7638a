"""`areal-hpc spool audit RUN`: proof from journal and spool that a run kept its promises.

Reads the ledger in order and the shards, and believes neither the controller nor the
journal's summaries:
- admission: at each admission floor((N_r - 1)/B) <= i + eta (Eq. 3), N_r and i recomputed;
- staleness: the versions of the tokens in the shards, not those in the journal, are within
  eta of the version that each sample was trained from (by their numbers: samples with tokens
  of versions that a step back to a checkpoint lost are counted);
- once: no sample is trained twice in the history that survives, steps follow one another;
- continued: what a stop cut short and a later attempt finished begins with what was saved;
- nothing lost: every committed sample was trained, discarded for a reason, or still waits,
  which is only for those that no batch went past (`audit_waiting`).
Prints the offender of each kind. Reads only; works on a running run too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.analysis.audit_unfinished import Continued, find_foreign_tokens
from areal_hpc.analysis.audit_waiting import Batch, Committed, find_forgotten
from areal_hpc.controller.ledger import LedgerError, read_ledger
from areal_hpc.controller.surviving import SurvivingVersions
from areal_hpc.paths import RunPaths
from areal_hpc.types import ShardRow

MAX_PRINTED = 20


@dataclass
class Audit:
    """What was found; `problems` is empty for a run that kept its promises."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    max_staleness_seen: int = 0


@dataclass
class _Terms:
    """What a `run` record says of the attempt."""

    batch_size: int
    group_size: int
    eta: int
    num_prompts: int
    overlap: bool = False
    total_steps: int = 0


def audit_run(root: Path) -> int:
    """Print the verdict on the run in `root`; 0 if nothing was found, else 1."""
    result = audit(RunPaths(root))
    for problem in result.problems[:MAX_PRINTED]:
        print(f"offender: {problem}")
    if len(result.problems) > MAX_PRINTED:
        print(f"... and {len(result.problems) - MAX_PRINTED} more")
    counts = result.counts
    print(
        f"{counts['attempts']} attempts, {counts['admitted']} groups admitted, {counts['committed']} committed in "
        f"{counts['shards']} shards, {counts['trained']} trained in {counts['steps']} steps, {counts['waiting']} "
        f"waiting, {counts['discarded']} discarded, {counts['dropped']} dropped, {counts['damaged']} damaged "
        f"({counts['unverified']} trained before that); largest staleness {result.max_staleness_seen}; "
        f"{counts['unfinished']} unfinished answers kept, {counts['continued']} gone on with; "
        f"{counts['lost versions']} trained answers have tokens of versions that a step back to a checkpoint lost"
    )
    print("audit failed" if result.problems else "audit passed")
    return 1 if result.problems else 0


def audit(paths: RunPaths) -> Audit:
    """Check everything; what cannot be read is a problem, not an exception."""
    auditor = _Auditor(paths)
    try:
        for record in read_ledger(paths.ledger):
            auditor.take(record)
    except LedgerError as error:
        auditor.result.problems.append(str(error))
    auditor.finish()
    return auditor.result


class _Auditor:
    """The state of a run, rebuilt record by record."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self.result = Audit()
        self._terms: _Terms | None = None
        self._live = 0
        self._admitted: set[int] = set()
        self._places: dict[int, int] = {}
        self._places_of: Counter[int] = Counter()
        self._started: set[int] = set()
        self._num_started: Counter[int] = Counter()
        self._starting = False
        self._committed: dict[int, Committed] = {}
        self._num_committed = self._num_mixed = 0
        self._batches: dict[int, Batch] = {}
        self._finished = False
        self._consumed: dict[int, int] = {}
        self._refused: set[int] = set()
        self._too_old: dict[int, int] = {}
        self._in_training: dict[int, list[int]] = {}
        self._quarantined: set[str] = set()
        self._last_step = 0
        self._trained: dict[int, tuple[int, int, int, Committed]] = {}
        self._continued: dict[int, Continued] = {}
        self._surviving = SurvivingVersions()

    def take(self, record: dict[str, Any]) -> None:
        kind = record["k"]
        if kind != "run" and self._terms is None:
            self._problem(f"the journal begins with a {kind} record")
            self._terms = _Terms(1, 1, 0, 1)
        self._surviving.take(record)
        self._starting &= kind in ("damaged", "committed")
        getattr(self, f"_take_{kind}", lambda record: None)(record)

    # ---- records -----------------------------------------------------------------

    def _take_run(self, record: dict[str, Any]) -> None:
        self.result.counts["attempts"] += 1
        self._terms = _Terms(
            record["batch_size"],
            record["group_size"],
            record["max_staleness"],
            record["num_prompts"],
            record.get("overlap", False),
            record.get("settings", {}).get("run.total_steps", 0),
        )
        step = record["train_step"]
        self._live = self._last_step = step
        self._consumed = {group: at for group, at in self._consumed.items() if at <= step}
        self._trained = {group: entry for group, entry in self._trained.items() if entry[0] <= step}
        self._too_old = {group: at for group, at in self._too_old.items() if at < step}
        self._batches = {at: batch for at, batch in self._batches.items() if at <= step}
        self._in_training = {}
        self._num_mixed, self._finished = 0, False
        # Groups without a result take their place again when they are granted again.
        self._starting = True
        self._places, self._places_of = {}, Counter()
        self._started, self._num_started = set(), Counter()
        for group, entry in self._committed.items():
            self._start(group, entry.num_rows if self._waits(group) else 0)
        for group in self._refused:
            self._start(group, 0)

    def _take_admitted(self, record: dict[str, Any]) -> None:
        terms, group = self._terms, record["group"]
        assert terms is not None
        if group in self._places:
            self._problem(f"group {group} was admitted although it had a place already")
        if record["epoch"] != group // terms.num_prompts:
            self._problem(f"group {group} was admitted in epoch {record['epoch']}")
        self._admitted.add(group)
        self._start(group, terms.group_size)
        num_admitted = self._live * terms.batch_size + self._places_taken()
        if (num_admitted - 1) // terms.batch_size > self._live + terms.eta:
            self._problem(
                f"group {group} was admitted as trajectory {num_admitted} at version {self._live}: "
                f"floor({num_admitted - 1}/{terms.batch_size}) > {self._live} + {terms.eta} (Eq. 3)"
            )
        if record["version"] != self._live:
            self._problem(f"group {group} was admitted at version {record['version']}, {self._live} was served")

    def _take_committed(self, record: dict[str, Any]) -> None:
        self._quarantined.discard(record["path"])  # it was missing and has appeared
        for listed in record["groups"]:
            group = listed["group"]
            if group not in self._admitted:
                self._problem(f"group {group} of {record['path']} was committed but never admitted")
            if group in self._committed:
                self._problem(f"group {group} was committed twice: {self._committed[group].path}, {record['path']}")
            rows = tuple(msgspec.convert(row, ShardRow) for row in listed["rows"])
            self._committed[group] = Committed(listed["epoch"], record["path"], rows, self._num_committed)
            self._num_committed += 1
            if group not in self._places:  # a shard found after a restart brings its own
                self._start(group, len(listed["rows"]))

    def _take_unfinished(self, record: dict[str, Any]) -> None:
        self.result.counts["unfinished"] += sum(len(group["rows"]) for group in record["groups"])

    def _take_continued(self, record: dict[str, Any]) -> None:
        self.result.counts["continued"] += len(record["rows"])
        self._continued[record["group"]] = Continued(record["path"], tuple(record["rows"]), record["version"])

    def _take_dropped(self, record: dict[str, Any]) -> None:
        self._refused.update(record["groups"])
        self._free(record["groups"])
        self.result.counts["dropped"] += len(record["groups"])

    def _take_discarded(self, record: dict[str, Any]) -> None:
        if record["reason"] == "too old":
            self._too_old |= dict.fromkeys(record["groups"], record["train_step"])
        else:
            self._refused.update(record["groups"])
        self._free(record["groups"])

    def _take_damaged(self, record: dict[str, Any]) -> None:
        self.result.counts["damaged"] += len(record["groups"])
        self._quarantined.add(record["path"])
        for group in record["groups"]:
            if self._committed.pop(group, None) is None:
                self._problem(f"group {group} of the damaged {record['path']} was not committed")
            self._consumed.pop(group, None)
            self._trained.pop(group, None)
            self._too_old.pop(group, None)
            if self._starting:
                # It waits like a new prompt; in a running attempt it keeps its place.
                self._free([group])
                self._started.discard(group)
                self._num_started[self._epoch(group)] -= 1

    def _take_consumed(self, record: dict[str, Any]) -> None:
        step, version, terms = record["train_step"], record["version"], self._terms
        assert terms is not None
        if step != self._last_step + 1 or version != step - 1:
            self._problem(f"step {step} from version {version} follows step {self._last_step}")
        self._last_step = step
        rows = 0
        epochs = set()
        for group in record["groups"]:
            entry = self._committed.get(group)
            if entry is None:
                self._problem(f"group {group} was trained at step {step} but never committed")
                continue
            if group in self._consumed:
                self._problem(f"group {group} was trained twice: at step {self._consumed[group]} and at step {step}")
            if group in self._refused or group in self._too_old:
                self._problem(f"group {group} was trained at step {step} although it was discarded")
            rows += entry.num_rows
            epochs.add(entry.epoch)
            self._consumed[group] = step
            self._trained[group] = (step, version, terms.eta, entry)
        if rows > terms.batch_size:
            self._problem(f"step {step} trained {rows} samples, more than a batch of {terms.batch_size}")
        if len(epochs) > 1:
            self._problem(f"step {step} mixed the epochs {sorted(epochs)}")
        self._in_training[step] = list(record["groups"])
        members = tuple(self._committed[group] for group in record["groups"] if group in self._committed)
        if members:
            self._batches[step] = Batch(step, version, terms.eta, members, self._num_committed, self._num_mixed)

    def _take_unconsumed(self, record: dict[str, Any]) -> None:
        for group in [group for group, at in self._consumed.items() if at == record["train_step"]]:
            del self._consumed[group], self._trained[group]
        self._last_step = record["train_step"] - 1
        self._in_training.pop(record["train_step"], None)
        self._batches.pop(record["train_step"], None)
        self._num_mixed = self._num_committed

    def _take_stop(self, record: dict[str, Any]) -> None:
        self._finished = record["state"] == "finished"

    def _take_live(self, record: dict[str, Any]) -> None:
        version, terms = record["version"], self._terms
        assert terms is not None
        # With weights.overlap one step may be under way while its predecessor's version goes out,
        # and a version whose publication failed meanwhile may be left out.
        ahead = int(terms.overlap)
        if not (self._live < version <= self._live + 1 + ahead and 0 <= self._last_step - version <= ahead):
            self._problem(f"version {version} was served after version {self._live} and step {self._last_step}")
        self._live = version
        for step in [step for step in self._in_training if step <= version]:
            self._free(self._in_training.pop(step))

    # ---- conclusions -------------------------------------------------------------

    def finish(self) -> None:
        counts = self.result.counts
        counts["admitted"], counts["committed"] = len(self._admitted), len(self._committed)
        counts["trained"], counts["steps"] = len(self._trained), len({entry[0] for entry in self._trained.values()})
        counts["discarded"] = len(self._committed.keys() & (self._refused | self._too_old.keys()))
        counts["waiting"] = sum(map(self._waits, self._committed))
        counts["lost versions"] = sum(
            row.max_version > self._surviving.newest(entry.path)
            for *_, entry in self._trained.values() for row in entry.rows
        )  # fmt: skip
        accounted = counts["trained"] + counts["discarded"] + counts["waiting"]
        if accounted != len(self._committed):
            self._problem(f"of {len(self._committed)} committed groups only {accounted} are accounted for")
        self._find_lost()
        for group, rows in self._read_shards():
            step, version, eta, entry = self._trained[group]
            if rows != entry.rows:
                self._problem(f"group {group} is not in {entry.path} what the journal says it is")
            if group in self._continued and entry.path not in self._quarantined:
                self.result.problems += find_foreign_tokens(
                    self._paths, group, entry.path, rows, self._continued[group]
                )
            if {row.group_id for row in rows} != {group} or len({row.sample_index for row in rows}) != len(rows):
                self._problem(f"the rows of {entry.path} for group {group} are not its samples")
            for row in rows:
                if not row.num_loss_tokens:
                    continue
                staleness = version - row.min_version
                self.result.max_staleness_seen = max(self.result.max_staleness_seen, staleness)
                if staleness > eta:
                    self._problem(
                        f"sample {row.sample_index} of group {group} (row {row.row} of {entry.path}) was trained at "
                        f"step {step} from version {version}; its oldest token is of version {row.min_version}: "
                        f"staleness {staleness} > {eta}"
                    )

    def _find_lost(self) -> None:
        """Groups of which nobody thinks any more."""
        terms = self._terms
        data_ended = terms is not None and self._finished and self._last_step < terms.total_steps
        waiting = {group: entry for group, entry in self._committed.items() if self._waits(group)}
        last = self._batches[max(self._batches)] if self._batches else None
        self.result.problems += find_forgotten(waiting, last, data_ended=data_ended)
        if data_ended:
            for group in sorted(self._admitted - self._committed.keys() - self._refused):
                self._problem(f"group {group} was admitted but neither answered nor left out, although the data ended")

    def _read_shards(self) -> Iterator[tuple[int, tuple[ShardRow, ...]]]:
        """(group, its rows as the spool has them) of every trained group; an unreadable shard is a problem.

        A shard that went to quarantine after some of its groups were trained is not there
        any more: the journal has to be believed for these.
        """
        from areal_hpc.spool.shard import ShardError, read_index

        by_path: dict[str, list[int]] = {}
        for group, (*_, entry) in self._trained.items():
            by_path.setdefault(entry.path, []).append(group)
        for path, groups in by_path.items():
            if path in self._quarantined:
                self.result.counts["unverified"] += len(groups)
                yield from ((group, self._trained[group][3].rows) for group in groups)
                continue
            self.result.counts["shards"] += 1
            try:
                info = read_index(self._paths.resolve_inside(path))
            except (ShardError, OSError) as error:
                self._problem(f"shard {path}, which {len(groups)} trained groups lie in: {error}")
                continue
            for group in groups:
                yield group, tuple(info.rows[row.row] for row in self._trained[group][3].rows)

    def _waits(self, group: int) -> bool:
        return not (group in self._consumed or group in self._refused or group in self._too_old)

    def _start(self, group: int, num_places: int) -> None:
        if num_places:
            self._places[group] = num_places
            self._places_of[self._epoch(group)] += num_places
        if group not in self._started:
            self._started.add(group)
            self._num_started[self._epoch(group)] += 1

    def _free(self, groups: list[int]) -> None:
        for group in groups:
            self._places_of[self._epoch(group)] -= self._places.pop(group, 0)

    def _places_taken(self) -> int:
        """Places of Eq. 3: an epoch that was started whole takes whole batches."""
        terms = self._terms
        assert terms is not None
        self._places_of = +self._places_of
        return sum(
            -(-num // terms.batch_size) * terms.batch_size
            if self._num_started[epoch] == terms.num_prompts
            else num
            for epoch, num in self._places_of.items()
        )

    def _epoch(self, group: int) -> int:
        assert self._terms is not None
        return group // self._terms.num_prompts

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)
