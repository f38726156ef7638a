"""`areal-hpc trace RUN -o trace.json`: the run as trace events for Perfetto or chrome://tracing.

    process (role and rank)  threads: main, weights, rewards, spool, engine; episodes on lanes
    flows                    lease (episode) -> shard -> training step -> version in service

Streams: telemetry is read line by line and written at once; only the flows' ends are held,
of at most `max_flows` groups, spread over the run. Times are whole microseconds since the
first life began, corrected by each rank's clock offset; the gaps between lives are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from areal_hpc.analysis.history import History, journal_records, load_history, rank_of, telemetry_files
from areal_hpc.analysis.records import json_lines, number
from areal_hpc.analysis.timeline import choose
from areal_hpc.config.errors import ConfigError

EXAMPLES = """examples:
  areal-hpc trace runs/quickstart -o trace.json
  areal-hpc trace runs/big --begin 3600 --end 3900 --max-ranks 32 -o hour1.json

Open the file in https://ui.perfetto.dev (it stays in the browser) or chrome://tracing.
"""
MAX_EVENTS = 2_000_000
"""A viewer takes about this many; a longer run is cut there and says so. Use --begin and --end."""
MAX_FLOWS = 2000
MAX_RANKS = 64
THREADS = {"main": 0, "engine": 1, "weights": 2, "rewards": 3, "spool": 4, "checkpoint": 5}
FIRST_LANE = 100
"""Thread id of the first lane of spans that lie side by side (episodes, scoring)."""
MAX_LANES = 512
MAX_TRACKS = 9
"""Threads of one kind, where its spans cross: ids of the further ones lie ten apart."""
SLACK_US = 20
"""Neighbours overlap by so much when they do not at all: starts and lengths are of different clocks."""
MAX_SIBLINGS = 1024
PLACES = {
    "rollout.idle": "engine", "rollout.update": "weights", "rollout.spool": "spool", "weights.snapshot": "weights",
}  # fmt: skip
SIDE_BY_SIDE = {"rollout.episode": "episodes", "rollout.eval": "evaluation", "reward.score": "rewards"}
COUNTERS = {
    "rollout.running": "sequences running", "rollout.generated_tokens": "generated tokens",
    "rollout.reward_s": "reward time (s)", "reward.seconds": "reward time (s)", "alive": "processor time (s)",
}  # fmt: skip
SKIPPED = ("t", "d", "s", "c", "a")


@dataclass
class Flow:
    """One group's way: where its episode, shard and training step lie (pid, tid, microseconds)."""

    shard: str = ""
    step: int = 0
    episode: tuple[int, int, int] | None = None


@dataclass
class Window:
    """Seconds since the run began that are written."""

    begin: float = 0.0
    end: float = float("inf")


class Track:
    """The spans of one thread, which have to nest to the microsecond: Perfetto drops what crosses another's end.

    They come about in the order of their ends, so that parts come before the whole.
    """

    def __init__(self) -> None:
        self._whole: deque[tuple[int, int]] = deque(maxlen=MAX_SIBLINGS)
        """Begin and end of the spans that are not part of another so far, one after the other."""

    def fit(self, begin: int, end: int) -> tuple[int, int] | None:
        """(begin, end) as they may be written, moved by SLACK_US at most; None if the span crosses another."""
        parts = 0
        for first, last in reversed(self._whole):
            if last <= begin:
                break
            if first <= begin and end <= last:
                return begin, end
            if first >= begin - SLACK_US and last <= end + SLACK_US:
                begin, end = min(begin, first), max(end, last)
                parts += 1
            elif last - begin <= SLACK_US:
                begin = last
                break
            else:
                return None
        for _ in range(parts):
            self._whole.pop()
        end = max(begin, end)
        self._whole.append((begin, end))
        return begin, end


def main(argv: list[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal-hpc trace", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a run as trace events: ranks, spans, counters, and the way of leases.",
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("-o", "--output", metavar="FILE", default="trace.json", help="default: trace.json")
    parser.add_argument("--begin", type=float, default=0.0, metavar="S",
                        help="leave out what ended before, seconds after the start")  # fmt: skip
    parser.add_argument("--end", type=float, default=float("inf"), metavar="S", help="leave out what began later")
    parser.add_argument("--max-ranks", type=int, default=MAX_RANKS, metavar="N",
                        help=f"ranks of a large run (default {MAX_RANKS})")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.end <= arguments.begin:
        raise ConfigError(f"--end={arguments.end:g} must lie after --begin={arguments.begin:g}")
    history = load_history(arguments.run)
    if not telemetry_files(history.paths):
        raise ConfigError(f"RUN={arguments.run} has no telemetry: no rank has been started yet")
    output = Path(arguments.output)
    try:
        with open(output, "w", encoding="utf-8") as stream:
            tracer = Tracer(history, stream, Window(arguments.begin, arguments.end), max_ranks=arguments.max_ranks)
            tracer.run()
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or output}: {error.strerror}") from None
    print(f"wrote {output}: {tracer.num_events:,} events, {tracer.num_flows:,} flows of {len(tracer.ranks)} ranks "
          f"({output.stat().st_size / 2**20:.1f} MiB); open it in https://ui.perfetto.dev")  # fmt: skip
    if tracer.truncated:
        print(f"warning: cut after {MAX_EVENTS:,} events; choose a stretch with --begin and --end", file=sys.stderr)
    return 0


class Tracer:
    """Writes one trace; `run` once."""

    def __init__(self, history: History, out: TextIO, window: Window, *, max_ranks: int = MAX_RANKS,
                 max_flows: int = MAX_FLOWS, max_events: int = MAX_EVENTS) -> None:  # fmt: skip
        self._history, self._out, self._window = history, out, window
        self._max_events = max_events
        self.ranks = choose(telemetry_files(history.paths), max_ranks)
        starts = [life.begin for life in history.lives]
        self._zero = starts[0] if starts else min((_first_time(path) for path in self.ranks), default=0.0)
        self._flows = choose_flows(history, max_flows)
        self._of_shard: dict[str, list[Flow]] = {}
        for flow in self._flows.values():
            self._of_shard.setdefault(flow.shard, []).append(flow)
        self._of_step: dict[int, list[Flow]] = {}
        for flow in self._flows.values():
            self._of_step.setdefault(flow.step, []).append(flow)
        self._steps: dict[int, tuple[int, int, int]] = {}
        self._live: dict[int, dict[int, tuple[int, int, int]]] = {}
        """Version -> attempt -> where it first came into service."""
        self._shards: dict[str, tuple[int, int, int]] = {}
        self.num_events = self.num_flows = 0
        self.truncated = False

    def run(self) -> None:
        self._out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for pid, path in enumerate(self.ranks):
            self._trace_rank(pid, path)
        for number_, life in enumerate(self._history.lives, 1):
            self._emit({"ph": "i", "s": "g", "name": f"attempt {number_} begins", "pid": 0, "tid": 0,
                        "ts": self._us(life.begin)}, life.begin)  # fmt: skip
        self._write_flows()
        self._out.write("\n]}\n")

    # ---- one rank --------------------------------------------------------------------

    def _trace_rank(self, pid: int, path: Path) -> None:
        role, rank = rank_of(path)
        order = {"controller": 0, "trainer": 1, "rollout": 2}.get(role, 3)
        self._name(pid, 0, "process_name", f"{role} {rank}")
        self._emit({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order * 100000 + rank}})
        named: set[int] = set()
        lanes: dict[str, list[float]] = {}
        tracks: dict[int, list[Track]] = {}
        ahead = 0.0
        for record in json_lines(path):
            if record.get("c") == "start":
                offset, error = number(record, "clock_s"), number(record, "clock_error_s")
                ahead = offset if abs(offset) > error else 0.0
            time = number(record, "t") - ahead
            if "s" in record:
                thread, label = self._thread(record, time, lanes)
                extent = self._us(time), self._us(time + number(record, "d"))
                if thread < FIRST_LANE:
                    further, extent = _place(tracks.setdefault(thread, []), extent)
                    thread, label = thread + 10 * further, f"{label} {further + 1}" if further else label
                if thread not in named:
                    named.add(thread)
                    self._name(pid, thread, "thread_name", label)
                self._span(pid, thread, record, time, extent)
            elif isinstance(record.get("c"), str):
                self._counter(pid, record, time)

    def _thread(self, record: dict[str, Any], time: float, lanes: dict[str, list[float]]) -> tuple[int, str]:
        """(thread id, its name): spans of a thread nest, those that lie side by side get lanes."""
        name = str(record["s"])
        kind = SIDE_BY_SIDE.get(name)
        if kind is None:
            place = PLACES.get(name, "main")
            if name == "weights.publish" and self._history.config.weights.overlap:
                place = "weights"
            return THREADS[place], place
        ends = lanes.setdefault(kind, [])
        end = time + number(record, "d")
        free = next((index for index, other in enumerate(ends) if other <= time), None)
        if free is None:
            free = len(ends) if len(ends) < MAX_LANES else MAX_LANES - 1
            ends.extend([0.0] * (free + 1 - len(ends)))
        ends[free] = max(ends[free], end)
        base = FIRST_LANE + MAX_LANES * list(SIDE_BY_SIDE.values()).index(kind)
        return base + free, f"{kind} {free + 1}"

    def _span(self, pid: int, tid: int, record: dict[str, Any], time: float, extent: tuple[int, int]) -> None:
        name, (begin, end) = str(record["s"]), extent
        wrote = self._emit(
            {"ph": "X", "name": name, "cat": name.partition(".")[0], "pid": pid, "tid": tid, "ts": begin,
             "dur": end - begin, "args": {key: value for key, value in record.items() if key not in SKIPPED}},
            time, time + number(record, "d"),
        )  # fmt: skip
        if not wrote:
            return
        # A flow binds to the innermost span around its time: the middle, or the start of one with parts.
        middle = (pid, tid, begin if name == "train.step" else (begin + end) // 2)
        if name == "rollout.episode" and (flow := self._flows.get(record.get("group", -1))) is not None:
            flow.episode = middle
        elif name == "rollout.spool" and record.get("path") in self._of_shard:
            self._shards[record["path"]] = middle
        elif name == "train.step" and record.get("train_step") in self._of_step:
            # A step that was trained again: the last one counts.
            held = self._steps.get(record["train_step"])
            if held is None or held[0] == pid:
                self._steps[record["train_step"]] = middle
        elif name == "rollout.update" and isinstance(record.get("version"), int):
            attempts = self._live.setdefault(record["version"], {})
            attempt = int(number(record, "a"))
            attempts[attempt] = min(middle, attempts.get(attempt, middle), key=lambda place: place[2])

    def _counter(self, pid: int, record: dict[str, Any], time: float) -> None:
        name = record["c"]
        if name == "checkpoint.seconds":
            seconds = number(record, "v")
            begin, end = self._us(time - seconds), self._us(time)
            self._name(pid, THREADS["checkpoint"], "thread_name", "checkpoint")
            self._emit({"ph": "X", "name": "checkpoint written", "cat": "train", "pid": pid,
                        "tid": THREADS["checkpoint"], "ts": begin, "dur": end - begin,
                        "args": {"train_step": record.get("train_step")}}, time - seconds, time)  # fmt: skip
        elif name in COUNTERS:
            self._emit({"ph": "C", "name": COUNTERS[name], "pid": pid, "tid": 0, "ts": self._us(time),
                        "args": {"value": record.get("v", 0)}}, time)  # fmt: skip

    # ---- flows -----------------------------------------------------------------------

    def _write_flows(self) -> None:
        """Arrows through whole ways only: episode, shard, step, and the version that came of it."""
        for group, flow in self._flows.items():
            step = self._steps.get(flow.step)
            # A step that was trained again made its version again.
            lives = [place for place in self._live.get(flow.step, {}).values() if step and place[2] >= step[2]]
            live = min(lives, key=lambda place: place[2], default=None)
            way = [place for place in (flow.episode, self._shards.get(flow.shard), step, live) if place is not None]
            # An arrow goes forwards in time; clocks may disagree.
            forwards = all(before[2] <= after[2] for before, after in zip(way, way[1:]))
            if flow.episode is None or len(way) < 3 or not forwards or self.truncated:
                continue
            for index, (pid, tid, at) in enumerate(way):
                phase = "s" if not index else "f" if index == len(way) - 1 else "t"
                self._emit({"ph": phase, "id": group, "name": "lease", "cat": "flow", "pid": pid, "tid": tid,
                            "ts": at} | ({"bp": "e"} if phase == "f" else {}))  # fmt: skip
            self.num_flows += 1

    # ---- writing ---------------------------------------------------------------------

    def _name(self, pid: int, tid: int, kind: str, name: str) -> None:
        self._emit({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})

    def _emit(self, event: dict[str, Any], begin: float | None = None, end: float | None = None) -> bool:
        """Write an event; False if it lies outside the window or beyond the limit."""
        if begin is not None:
            last = (begin if end is None else end) - self._zero
            if last < self._window.begin or begin - self._zero > self._window.end:
                return False
            if self.num_events >= self._max_events:
                self.truncated = True
                return False
        self._out.write((",\n" if self.num_events else "") + json.dumps(_finite(event), separators=(",", ":")))
        self.num_events += 1
        return True

    def _us(self, time: float) -> int:
        """Whole microseconds since the beginning: what nests still does, and no viewer rounds it again."""
        return max(0, round((time - self._zero) * 1e6))


def _place(tracks: list[Track], extent: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """(index of the first thread of a kind into which a span fits, its extent there)."""
    for index, track in enumerate(tracks):
        if (fitted := track.fit(*extent)) is not None:
            return index, fitted
    if len(tracks) < MAX_TRACKS:
        tracks.append(Track())
        tracks[-1].fit(*extent)
        return len(tracks) - 1, extent
    return 0, extent


def _finite(value: Any) -> Any:
    """NaN and infinities as text: a viewer refuses a file with what is no JSON."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def choose_flows(history: History, most: int) -> dict[int, Flow]:
    """Group -> its shard and training step in the surviving history, of at most `most` groups evenly spread."""
    from areal_hpc.analysis.trained import load_step_of

    step_of = load_step_of(history.paths.ledger, max(history.steps, default=0))
    groups = sorted(step_of)
    if len(groups) > most:
        groups = [groups[round(index * (len(groups) - 1) / (most - 1))] for index in range(most)]
    flows = {group: Flow(step=step_of[group][0]) for group in groups}
    for record in journal_records(history.paths.ledger, "committed"):
        for listed in record.get("groups", ()):
            if (flow := flows.get(listed["group"])) is not None:
                flow.shard = record["path"]
    return flows


def _first_time(path: Path) -> float:
    return next((number(record, "t") for record in json_lines(path)), 0.0)
