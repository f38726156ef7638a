"""What a run did, step by step and attempt by attempt, from metrics.jsonl, journal and telemetry.

A resumed run trains some steps again. Only the history that survives counts: a step of an
earlier attempt beyond the checkpoint from which a later one went on is replaced, whether or
not the later one came so far. `load_history` reads; everything else is pure.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.analysis.records import json_lines, number, parse, tail
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import read_config
from areal_hpc.config.schema import Config
from areal_hpc.paths import RunPaths

JOURNAL_PREFIX = 9
"""Bytes of checksum and space before the JSON of a journal line."""
SAME_START_S = 30.0
"""Two marks of a start closer than this are one start."""


@dataclass(frozen=True)
class Life:
    """One start of the ranks: seconds since the epoch of its first and last sign of life."""

    begin: float
    end: float
    first_step: int = 0
    """Training step of the checkpoint it went on from."""

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin)


@dataclass
class RunClock:
    """Time while the ranks ran: the gaps between lives (in the queue) are left out."""

    lives: list[Life]

    @property
    def total_s(self) -> float:
        return sum(life.seconds for life in self.lives)

    @property
    def gaps_s(self) -> float:
        """Seconds between lives, in which the run waited to be started again."""
        return sum(max(0.0, after.begin - before.end) for before, after in zip(self.lives, self.lives[1:]))

    @property
    def starts(self) -> list[float]:
        """Run time at which each life begins."""
        found, total = [], 0.0
        for life in self.lives:
            found.append(total)
            total += life.seconds
        return found

    def run_s(self, time: float) -> float:
        """Seconds of run time at `time` (since the epoch); times in a gap are its beginning."""
        if not self.lives:
            return 0.0
        index = bisect.bisect_right([life.begin for life in self.lives], time) - 1
        if index < 0:
            return 0.0
        return self.starts[index] + min(max(0.0, time - self.lives[index].begin), self.lives[index].seconds)


@dataclass
class History:
    """A run. `steps` and `evals` by training step, the surviving ones, in order."""

    paths: RunPaths
    config: Config
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    evals: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    replaced: list[dict[str, Any]] = field(default_factory=list)
    """Step records whose weights did not survive."""
    begun: list[dict[str, Any]] = field(default_factory=list)
    """`run` records of the journal: attempt, train_step, time, max_staleness, batch_size, ..."""
    lives: list[Life] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def clock(self) -> RunClock:
        return RunClock(self.lives)

    @property
    def bound(self) -> int:
        """The admission bound eta that held last."""
        if self.begun:
            return int(self.begun[-1].get("max_staleness", 0))
        return 0 if self.config.run.mode.value == "sync" else self.config.algorithm.max_staleness


def open_run(folder: str | Path) -> tuple[RunPaths, Config]:
    """Paths and configuration of a run; ConfigError names the folder if it is none."""
    paths = RunPaths(Path(folder).expanduser())
    if not paths.config.is_file():
        raise ConfigError(f"RUN={folder} holds no config.yaml: give the folder of a run")
    return paths, read_config(paths.config)


def load_history(folder: str | Path) -> History:
    """Read a run that is over, runs, or was killed; ConfigError if the folder is no run."""
    paths, config = open_run(folder)
    history = History(paths, config)
    history.begun = list(journal_records(paths.ledger, "run"))
    survive(history, json_lines(paths.metrics))
    history.lives = find_lives(paths, history.begun)
    return history


def journal_records(ledger: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The journal's records of one kind, found without a look into the others."""
    mark = b'{"k":"%s"' % kind.encode()
    try:
        stream = open(ledger, "rb")
    except OSError:
        return
    with stream:
        for line in stream:
            if line.startswith(mark, JOURNAL_PREFIX) and (record := parse(line[JOURNAL_PREFIX:])) is not None:
                yield record


def survive(history: History, records: Iterable[dict[str, Any]]) -> None:
    """Sort the lines of metrics.jsonl into steps, evaluations and events of the surviving history."""
    start_of = {int(record["attempt"]): int(record["train_step"]) for record in history.begun}
    attempt = 0
    for record in records:
        step = int(number(record, "train_step"))
        now = int(number(record, "attempt", 1))
        if now > attempt:
            for number_ in range(attempt + 1, now + 1):
                # Without a journal the first step that is done again tells.
                _go_back(history, start_of.get(number_, step - 1 if record.get("kind") == "step" else None))
            attempt = now
        match record.get("kind"):
            case "step":
                history.steps[step] = record
            case "eval":
                history.evals[step] = record
            case "event":
                history.events.append(record)
    for number_ in sorted(other for other in start_of if other > attempt):
        _go_back(history, start_of[number_])
    history.steps = dict(sorted(history.steps.items()))
    history.evals = dict(sorted(history.evals.items()))


def _go_back(history: History, step: int | None) -> None:
    if step is None:
        return
    history.replaced += [record for at, record in history.steps.items() if at > step]
    history.steps = {at: record for at, record in history.steps.items() if at <= step}
    history.evals = {at: record for at, record in history.evals.items() if at <= step}


# ---- lives -----------------------------------------------------------------------------


def find_lives(paths: RunPaths, begun: list[dict[str, Any]]) -> list[Life]:
    """Every start of the ranks, from the controller's telemetry, and how long each lasted."""
    starts = start_times(paths.spans("controller", 0)) or [
        (number(record, "time"), int(number(record, "attempt"))) for record in begun
    ]
    if not starts:
        return []
    begins = [begin for begin, _ in starts]
    step_of = {int(number(record, "attempt")): int(number(record, "train_step")) for record in begun}
    ends = _last_signs(paths, begins)
    # The controller is not always the last to be heard.
    ends[-1] = max([ends[-1], *map(last_time, telemetry_files(paths))])
    return [
        Life(begin, max(begin, end), step_of.get(attempt, 0))
        for (begin, attempt), end in zip(starts, ends, strict=True)
    ]


def telemetry_files(paths: RunPaths) -> list[Path]:
    """One file a rank, by role and rank."""
    return sorted(paths.telemetry.glob("*-*.jsonl"))


def rank_of(path: Path) -> tuple[str, int]:
    """(role, role rank) from the name of a telemetry file."""
    role, _, rank = path.stem.rpartition("-")
    return role, int(rank) if rank.isdigit() else 0


def start_times(path: Path) -> list[tuple[float, int]]:
    """(when a rank was started, as which attempt) from the marks in its telemetry."""
    found: list[tuple[float, int]] = []
    try:
        stream = open(path, "rb")
    except OSError:
        return []
    with stream:
        for line in stream:
            if b'"c":"start' not in line:
                continue
            record = parse(line)
            if record is None or (found and number(record, "t") <= found[-1][0] + SAME_START_S):
                continue
            found.append((number(record, "t"), int(number(record, "v")) if record["c"] == "start" else len(found) + 1))
    return found


def last_time(path: Path) -> float:
    """Time of the last line of a telemetry file; 0 without one."""
    return max((number(record, "t") + number(record, "d") for record in tail(path, 4096)), default=0.0)


def _last_signs(paths: RunPaths, begins: list[float]) -> list[float]:
    """Time of the last line within each life, in the controller's telemetry and in metrics.jsonl."""
    ends = list(begins)

    def take(begin: float, end: float) -> None:
        index = bisect.bisect_right(begins, begin) - 1
        if index >= 0:
            ends[index] = max(ends[index], end)

    for record in json_lines(paths.spans("controller", 0)):
        take(number(record, "t"), number(record, "t") + number(record, "d"))
    for record in json_lines(paths.metrics):
        take(number(record, "time"), number(record, "time"))
    return ends
