"""What every rank did when, from the spans in its telemetry: exclusive activities, per rank and summed.

Reads each file once, line by line, into a fixed number of bins and a sum per activity. The
activities of a rank do not overlap: a span inside another (log-probs in a step) is taken off
the outer one, and of a rollout's spans that lie over one another the stronger counts. Time
without any span is a rollout's generation, a reward rank's scoring and the controller's control.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.analysis.history import History, RunClock, rank_of, telemetry_files
from areal_hpc.analysis.overlap import Exclusive, Part
from areal_hpc.analysis.records import json_lines, number

NUM_BINS = 1200
MAX_FILES = 48
"""Ranks that are read: of more, as many of each role as its share, spread evenly."""
MAX_GAUGE_GAP_S = 5.0

START, GENERATE, EVALUATE, SCORE, LOGPROBS, UPDATE, OPTIMIZER, STEP, WEIGHTS, SAVE, IDLE, CONTROL = ACTIVITIES = (
    "start-up", "generate", "evaluate", "score", "log-probs", "forward + backward", "optimizer", "other step work",
    "weights", "checkpoint", "idle", "control",
)  # fmt: skip
USEFUL = (GENERATE, EVALUATE, SCORE, LOGPROBS, UPDATE, OPTIMIZER, STEP)

SPANS: dict[str, tuple[str, str]] = {
    "train.step": (STEP, ""),
    "train.logprobs": (LOGPROBS, STEP),
    "train.update": (UPDATE, STEP),
    "train.optimizer": (OPTIMIZER, UPDATE),
    "train.wait": (IDLE, ""),
    "train.checkpoint": (SAVE, ""),
    "train.export": (SAVE, ""),
    "weights.connect": (WEIGHTS, ""),
    "weights.snapshot": (WEIGHTS, ""),
    "weights.publish": (WEIGHTS, ""),
    "rollout.update": (WEIGHTS, GENERATE),
    "rollout.idle": (IDLE, GENERATE),
    "rollout.eval": (EVALUATE, GENERATE),
    "reward.idle": (IDLE, SCORE),
}
"""Span -> its activity and the one it is taken off."""

STRENGTH = {EVALUATE: 1, IDLE: 2, WEIGHTS: 3}
"""Of a rollout's spans, which are all taken off its generation: an engine may be idle, or be
updated while it is idle, during an evaluation; the requests of one run side by side."""

RESTS = {"rollout": GENERATE, "controller": CONTROL, "reward": SCORE}
"""What a rank does while no span says otherwise."""

BEFORE, BETWEEN, AFTER, BOUND, REWARD, ENGINE = WAITS = (
    "before the first step", "for samples between steps", "after the last step",
    "for leases: the staleness bound was reached", "for rewards", "for an engine that was restarted",
)  # fmt: skip
TAIL = "after the last prompt was answered"


@dataclass
class RankTime:
    """One rank: seconds per activity, shares per bin [activity, bin], and what its idleness waited for."""

    role: str
    rank: int
    host: str = ""
    cpus: tuple[int, ...] = ()
    seconds: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    bins: np.ndarray = field(default_factory=lambda: np.zeros((len(ACTIVITIES), NUM_BINS)))
    run_s: float = 0.0
    """Run time from its first to its last sign of life, over all lives."""
    generated_tokens: float = 0.0
    running_s: float = 0.0
    """Sequences running, integrated over time; divided by the seconds of the gauges a mean batch."""
    gauge_s: float = 0.0

    @property
    def useful_s(self) -> float:
        return sum(self.seconds[name] for name in USEFUL)


@dataclass
class Timeline:
    """All ranks that were read; `num_ranks` by role says how many there are."""

    clock: RunClock
    ranks: list[RankTime] = field(default_factory=list)
    num_ranks: Counter[str] = field(default_factory=Counter)
    transfers: list[dict[str, float]] = field(default_factory=list)
    """Of each publication: version, time (run seconds), total_s, transfer_s, pause_to_resume_s, ..."""
    reward_queue: int = 0
    """Most checks that ever waited for a worker."""

    def of(self, role: str) -> list[RankTime]:
        return [rank for rank in self.ranks if rank.role == role]

    def seconds(self, role: str) -> Counter[str]:
        return sum((rank.seconds for rank in self.of(role)), Counter())

    def waits(self, role: str) -> Counter[str]:
        return sum((rank.waits for rank in self.of(role)), Counter())

    def share(self, role: str) -> dict[str, float]:
        """Share of each activity in the run time of the role's ranks."""
        total = sum(rank.run_s for rank in self.of(role))
        return {name: value / total for name, value in self.seconds(role).items()} if total else {}


def load_timeline(history: History) -> Timeline:
    """Read the telemetry of a run, of many ranks a fair selection."""
    found = Timeline(history.clock)
    files = telemetry_files(history.paths)
    found.num_ranks = Counter(rank_of(path)[0] for path in files)
    for path in choose(files):
        found.ranks.append(_Reader(path, found, history).read())
    order = {"controller": 0, "trainer": 1, "rollout": 2}
    found.ranks.sort(key=lambda rank: (order.get(rank.role, 3), rank.rank))
    return found


def choose(files: list[Path], most: int = MAX_FILES) -> list[Path]:
    """At most about `most` files, each role by its share and with at least one."""
    by_role: dict[str, list[Path]] = {}
    for path in files:
        by_role.setdefault(rank_of(path)[0], []).append(path)
    chosen = []
    for members in by_role.values():
        count = min(len(members), max(1, round(most * len(members) / max(most, len(files)))))
        chosen += [members[round(index * (len(members) - 1) / max(1, count - 1))] for index in range(count)]
    return chosen


class _Reader:
    """One rank's file into a RankTime."""

    def __init__(self, path: Path, timeline: Timeline, history: History) -> None:
        self._path, self._timeline, self._clock = path, timeline, timeline.clock
        # A publication in the background takes no time of the trainer's own.
        self._overlap = history.config.weights.overlap
        self._begun = [number(record, "time") for record in history.begun]
        role, rank = rank_of(path)
        self._rank = RankTime(role, rank)
        self._ahead_s = 0.0
        self._begin = 0.0
        self._last = 0.0
        self._work_began = 0.0
        self._has_idle = False
        self._tail = Counter[str]()
        self._stepped = False
        self._exclusive = Exclusive()
        self._gauge: tuple[float, float] | None = None
        self._tokens = 0.0

    def read(self) -> RankTime:
        for record in json_lines(self._path):
            time = number(record, "t") - self._ahead_s
            name = record.get("c")
            if isinstance(name, str) and name.startswith("start"):
                self._take_start(record, time, name)
            elif "s" in record:
                self._take_span(record, time)
            elif name is not None:
                self._take_gauge(record, time, str(name))
            self._last = max(self._last, time + number(record, "d"))
        self._end_life()
        return self._rank

    # ---- lives -----------------------------------------------------------------------

    def _take_start(self, record: dict[str, Any], time: float, name: str) -> None:
        if name == "start":
            self._end_life()
            self._rank.host = str(record.get("host", ""))
            self._rank.cpus = tuple(record.get("cpus") or ())
            ahead, error = number(record, "clock_s"), number(record, "clock_error_s")
            # Within its error an offset may as well be none.
            ahead = ahead if abs(ahead) > error else 0.0
            time += self._ahead_s - ahead
            self._ahead_s = ahead
            self._begin, self._has_idle = time, True
        elif not self._begin:
            self._begin = time

    def _end_life(self) -> None:
        """Close the books of one life: what was not said to be something else is generation, or control."""
        if not self._begin or self._last <= self._begin:
            self._begin = 0.0
            return
        self._rank.run_s += self._clock.run_s(self._last) - self._clock.run_s(self._begin)
        if self._rank.role == "controller":
            self._work_began = next((time for time in self._begun if self._begin <= time <= self._last), 0.0)
        if not self._work_began:
            self._add(START, self._begin, self._last)
        else:
            self._add(START, self._begin, self._work_began)
            if self._rank.role in RESTS:
                self._add(RESTS[self._rank.role], self._work_began, self._last)
        for why, seconds in self._tail.items():
            self._rank.waits[TAIL if why in (BOUND, REWARD) else AFTER if self._stepped else BEFORE] += seconds
        self._tail = Counter()
        self._begin = self._work_began = 0.0
        self._stepped, self._gauge, self._tokens = False, None, 0.0
        self._exclusive = Exclusive()

    # ---- spans -----------------------------------------------------------------------

    def _take_span(self, record: dict[str, Any], time: float) -> None:
        name, seconds = str(record["s"]), number(record, "d")
        if name == "rollout.episode":
            self._flush(BOUND)
        elif name == "train.step":
            self._flush(BETWEEN if self._stepped else BEFORE)
            self._stepped = True
        elif name == "reward.score":
            self._timeline.reward_queue = max(self._timeline.reward_queue, int(number(record, "queue")))
        elif name == "weights.publish" and "total_s" in record:
            values = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
            self._timeline.transfers.append(values | {"time": self._clock.run_s(time)})
        if name not in SPANS or (name == "weights.publish" and self._overlap):
            return
        if not self._work_began and name != "weights.connect":
            self._work_began = time
        activity, outer = SPANS[name]
        begin, end = time, time + seconds
        if outer == GENERATE:
            self._claim(activity, begin, end, str(record.get("waiting", "")))
            return
        self._add(activity, begin, end)
        if outer:
            self._add(outer, begin, end, -1.0)
        if activity == IDLE and self._rank.role != "reward":
            self._tail[BETWEEN] += seconds

    def _claim(self, activity: str, begin: float, end: float, waiting: str) -> None:
        """A span of a rollout: it gets what no stronger one has, from a weaker one or from generation."""
        for part, before in self._exclusive.put(Part(begin, end, STRENGTH[activity], activity, waiting)):
            self._add(activity, part.begin, part.end)
            self._add(before.activity if before else GENERATE, part.begin, part.end, -1.0)
            for entry, sign in ((part, 1.0), (before, -1.0)):
                if entry is not None and entry.activity == IDLE:
                    self._wait(entry.why, sign * (part.end - part.begin))

    def _wait(self, waiting: str, seconds: float) -> None:
        """Idleness of an engine by what it waited for; less than none takes some of it back."""
        why = {"engine": ENGINE, "reward": REWARD}.get(waiting, BOUND)
        # What is taken back may have been flushed meanwhile.
        open_ = why != ENGINE and (seconds > 0 or self._tail[why] > 0)
        (self._tail if open_ else self._rank.waits)[why] += seconds

    def _flush(self, why: str) -> None:
        """Work came after this idleness: it was not the end."""
        for kind, seconds in self._tail.items():
            self._rank.waits[kind if kind in (BOUND, REWARD) else why] += seconds
        self._tail.clear()

    # ---- gauges ----------------------------------------------------------------------

    def _take_gauge(self, record: dict[str, Any], time: float, name: str) -> None:
        if name == "reward.seconds" and not self._work_began:
            self._work_began = time  # it reports from the moment its workers are ready
        if self._rank.role != "rollout":
            return
        if name == "rollout.generated_tokens":
            if not self._work_began:
                self._work_began = time  # it reports from the moment the engine answers
            value = number(record, "v")
            self._rank.generated_tokens += value - (self._tokens if value >= self._tokens else 0.0)
            self._tokens = value
        elif name == "rollout.running":
            running, before = number(record, "v"), self._gauge
            self._gauge = (time, running)
            if before is None or time - before[0] > MAX_GAUGE_GAP_S:
                return
            seconds = time - before[0]
            if running or before[1]:
                self._rank.running_s += seconds * (running + before[1]) / 2
                self._rank.gauge_s += seconds
            elif not self._has_idle:  # files without spans of idleness
                self._claim(IDLE, before[0], time, "lease")

    def _add(self, activity: str, begin: float, end: float, sign: float = 1.0) -> None:
        """Seconds of run time to an activity, and to the bins that they lie in."""
        first, last = self._clock.run_s(begin), self._clock.run_s(end)
        if last <= first:
            return
        self._rank.seconds[activity] += sign * (last - first)
        total = self._clock.total_s
        if total <= 0:
            return
        row, scale = self._rank.bins[ACTIVITIES.index(activity)], NUM_BINS / total
        low, high = first * scale, min(last * scale, NUM_BINS)
        start, stop = int(low), min(int(high), NUM_BINS - 1)
        if start >= stop:
            row[min(start, NUM_BINS - 1)] += sign * (high - low)
            return
        row[start] += sign * (start + 1 - low)
        row[start + 1 : stop] += sign
        row[stop] += sign * (high - stop)
