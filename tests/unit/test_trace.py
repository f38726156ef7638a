"""`areal-hpc trace`: what Perfetto asks of trace events, spans that nest, flows that pair up, a bounded file."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from areal_hpc.analysis import trace
from areal_hpc.analysis.history import load_history
from areal_hpc.cli import main as cli
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.paths import RunPaths
from controller_world import Disk
from run_folders import T0, make_run, quicken, set_times, write_ranks


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run, made once."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        found = make_run(tmp_path_factory.mktemp("trace")).paths
    set_times(found, [(T0, 0)])
    write_ranks(found)
    return found


@pytest.fixture
def paths(finished, tmp_path) -> RunPaths:
    """A copy of it, for a test to change."""
    return RunPaths(Path(shutil.copytree(finished.root, tmp_path / "run")))


def events_of(paths, **options) -> list[dict]:
    """Events of the trace, after a look at the format of each."""
    out = io.StringIO()
    trace.Tracer(load_history(paths.root), out, trace.Window(), **options).run()
    return check_format(out.getvalue())


FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}, "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "args"}, "i": {"ph", "s", "name", "pid", "tid", "ts"},
    **dict.fromkeys("st", {"ph", "id", "name", "cat", "pid", "tid", "ts"}),
    "f": {"ph", "id", "name", "cat", "pid", "tid", "ts", "bp"},
}  # fmt: skip
"""Trace Event Format: phase -> its fields."""


def no_json(constant: str):
    raise AssertionError(f"{constant} is no JSON")


def check_format(text: str) -> list[dict]:
    """Events of a trace that a viewer takes whole: fields and types, names of all tracks, nesting, flows."""
    document = json.loads(text, parse_constant=no_json)
    assert document.keys() == {"displayTimeUnit", "traceEvents"} and document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    processes, threads = set(), set()
    for event in events:
        assert FIELDS[event["ph"]] <= event.keys() <= FIELDS[event["ph"]] | {"tid"}, event
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int)
        for key in ("ts", "dur"):
            assert key not in event or (type(event[key]) is int and event[key] >= 0), f"microseconds: {event}"
        if event["ph"] == "M":
            kinds = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
            assert event["args"].keys() == {kinds[event["name"]]}
            processes |= {event["pid"]} if event["name"] == "process_name" else set()
            threads |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
        elif event["ph"] == "C":
            assert all(isinstance(value, (int, float, str)) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    assert {event["pid"] for event in events} <= processes
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xstf"} <= threads
    check_stacks(events)
    return events


def check_stacks(events: list[dict]) -> None:
    """By Perfetto's rules: no span crosses another's end on its thread; each end of a flow finds one that is open.

    Of events at the same time the longest span comes first, then what has no length, in the file's order.
    """
    stacks: dict[tuple[int, int], list[dict]] = defaultdict(list)
    flows: dict[tuple, list[str]] = defaultdict(list)
    timed = [event for event in events if event["ph"] in "Xstf"]
    for event in sorted(timed, key=lambda event: (event["ts"], -event.get("dur", -1))):
        stack = stacks[event["pid"], event["tid"]]
        if event["ph"] == "X":
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            for outer in stack:
                assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"], f"{event} crosses {outer}"
            stack.append(event)
        else:
            # A flow goes to the span that began last, whether or not that has ended.
            assert stack and event["ts"] <= stack[-1]["ts"] + stack[-1]["dur"], f"no span around {event}"
            flows[event["cat"], event["name"], event["id"]].append(event["ph"])
            assert event["ph"] != "f" or event["bp"] == "e"
    for key, phases in flows.items():
        assert phases[0] == "s" and phases[-1] == "f" and set(phases[1:-1]) <= {"t"}, (key, phases)


def test_the_trace_keeps_the_trace_event_format(paths):
    phases = Counter(event["ph"] for event in events_of(paths))
    assert phases["X"] > 100 and phases["s"] == phases["f"] == 24 and phases.keys() == set(FIELDS)


@pytest.mark.parametrize("jitter_us", [0.0, 0.6, 4.0])
def test_spans_that_overlap_by_the_error_of_their_clocks_nest(paths, jitter_us):
    """A start and a length are measured by two clocks, each to a microsecond."""
    numbers = random.Random(1)
    path = paths.spans("trainer", 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "s" in line:
            line["t"] = round(line["t"] + numbers.uniform(-1, 1) * jitter_us * 1e-6, 6)
            line["d"] = round(line["d"] + numbers.uniform(-1, 1) * jitter_us * 1e-6, 6)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [event for event in events_of(paths) if event["name"] == "train.step"]
    assert len({event["tid"] for event in steps}) == 1
    for number, step in enumerate(steps):
        assert step["ts"] == pytest.approx(7e6 + number * 10e6, abs=50) and step["dur"] == pytest.approx(6e6, abs=50)


def test_spans_that_cross_get_threads_of_their_own(paths):
    with open(paths.spans("trainer", 0), "a") as file:
        for begin in (100.0, 103.0, 106.0):
            file.write(json.dumps({"t": T0 + begin, "d": 4.0, "s": "train.checkpoint"}) + "\n")
    events = events_of(paths)
    saves = [event for event in events if event["name"] == "train.checkpoint"]
    assert [(event["ts"], event["dur"]) for event in saves] == [(1e8, 4e6), (1.03e8, 4e6), (1.06e8, 4e6)]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[event["pid"], event["tid"]] for event in saves] == ["main", "main 2", "main"]


def test_what_is_no_number_is_written_as_text(paths):
    with open(paths.spans("rollout", 0), "a") as file:
        file.write('{"t": %f, "d": 1.0, "s": "reward.score", "sums": {"math": NaN}}\n' % (T0 + 80))
    found = [event["args"] for event in events_of(paths) if event["name"] == "reward.score"]
    assert {"sums": {"math": "nan"}} in found


def test_every_trained_group_flows_from_its_lease_to_its_version(paths):
    events = events_of(paths)
    spans = [event for event in events if event["ph"] == "X"]
    flows: dict[int, list[dict]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "flow":
            flows[event["id"]].append(event)
    records = list(read_ledger(paths.ledger))
    step_of = {group: r["train_step"] for r in records if r["k"] == "consumed" for group in r["groups"]}
    shard_of = {group["group"]: r["path"] for r in records if r["k"] == "committed" for group in r["groups"]}
    assert flows.keys() == step_of.keys() and len(flows) == 24
    for group, ends in flows.items():
        assert [end["ph"] for end in ends] == ["s", "t", "t", "f"]
        assert [end["ts"] for end in ends] == sorted(end["ts"] for end in ends)
        under = [_enclosing(spans, end) for end in ends]
        assert [span["name"] for span in under] == ["rollout.episode", "rollout.spool", "train.step", "rollout.update"]
        assert under[0]["args"]["group"] == group
        assert under[1]["args"]["path"] == shard_of[group]
        assert under[2]["args"]["train_step"] == under[3]["args"]["version"] == step_of[group]


def _enclosing(spans: list[dict], end: dict) -> dict:
    """The innermost span that a viewer would bind a flow's end to."""
    found = [span for span in spans if (span["pid"], span["tid"]) == (end["pid"], end["tid"])
             and span["ts"] <= end["ts"] <= span["ts"] + span["dur"]]  # fmt: skip
    # The middle of a step lies in its parts as well; the arrow goes to the step that holds them.
    steps = [span for span in found if span["name"] == "train.step"]
    return steps[0] if steps else min(found, key=lambda span: span["dur"])


def test_flows_of_a_resumed_run_go_through_the_steps_that_survived(tmp_path, monkeypatch):
    quicken(monkeypatch)
    disk = Disk()
    make_run(tmp_path, crash_at=40, disk=disk)
    first = disk.newest
    paths = make_run(tmp_path, seed=1, disk=disk).paths
    set_times(paths, [(T0, 0), (T0 + 5000.0, first)])
    write_ranks(paths, T0, range(1, first + 2))  # one step more than was saved
    write_ranks(paths, T0 + 5000.0, range(first + 1, 7))
    for role, rank in (("trainer", 0), ("rollout", 0), ("rollout", 1)):
        path = paths.spans(role, rank)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line | {"a": 1 + (line["t"] > T0 + 4000)}) + "\n" for line in lines))
    events = events_of(paths)
    spans = [event for event in events if event["ph"] == "X"]
    ends = [event for event in events if event["ph"] == "f"]
    found = Counter(_enclosing(spans, end)["args"]["version"] for end in ends)
    assert found == {version: 4 for version in range(1, 7)}
    again = [end["ts"] for end in ends if _enclosing(spans, end)["args"]["version"] > first]
    assert min(again) > 5000e6


def test_ranks_are_named_and_side_by_side_spans_have_lanes(paths):
    events = events_of(paths)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert names == {"controller 0", "trainer 0", "rollout 0", "rollout 1"}
    episodes = [event for event in events if event["ph"] == "X" and event["name"] == "rollout.episode"]
    lanes = defaultdict(list)
    for episode in episodes:
        lanes[episode["pid"], episode["tid"]].append((episode["ts"], episode["ts"] + episode["dur"]))
    assert len(lanes) > 2
    for spans in lanes.values():
        assert all(before[1] <= after[0] for before, after in zip(sorted(spans), sorted(spans)[1:]))
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "generated tokens"]
    assert [event["args"]["value"] for event in counters[:3]] == [100, 200, 300]
    assert counters[0]["ts"] == 14.5e6


def test_clock_offsets_are_taken_off(paths):
    path = paths.spans("trainer", 0)
    path.write_text(path.read_text().replace('"clock_s":0.0', '"clock_s":-100.0', 1))
    steps = [event for event in events_of(paths) if event["name"] == "train.step"]
    assert steps[0]["ts"] == pytest.approx((7.0 + 100.0) * 1e6)


def test_limits_hold(paths, tmp_path, monkeypatch, capsys):
    assert len({event["id"] for event in events_of(paths, max_flows=5) if event.get("cat") == "flow"}) == 5
    monkeypatch.setattr(trace, "MAX_EVENTS", 50)
    out = io.StringIO()
    tracer = trace.Tracer(load_history(paths.root), out, trace.Window(), max_events=50)
    tracer.run()
    assert tracer.truncated and len(json.loads(out.getvalue())["traceEvents"]) < 80
    output = tmp_path / "t.json"
    assert cli(["trace", str(paths.root), "-o", str(output), "--begin", "30", "--end", "40"]) == 0
    inside = [event for event in json.loads(output.read_text())["traceEvents"] if event["ph"] == "X"]
    assert inside and all(event["ts"] <= 40e6 and event["ts"] + event["dur"] >= 30e6 for event in inside)
    assert cli(["trace", str(paths.root), "-o", str(output), "--begin", "3", "--end", "2"]) == 2
    assert capsys.readouterr().err == "areal-hpc: --end=2 must lie after --begin=3\n"


def test_a_killed_run_is_traced_up_to_its_torn_end(tmp_path, monkeypatch):
    quicken(monkeypatch)
    disk = Disk()
    paths = make_run(tmp_path, crash_at=40, disk=disk).paths
    set_times(paths, [(T0, 0)])
    write_ranks(paths, steps=range(1, 3))
    for path in (paths.spans("trainer", 0), paths.ledger):
        path.write_bytes(path.read_bytes()[:-20])
    events = events_of(paths)
    assert [event["args"]["train_step"] for event in events if event["name"] == "train.step"] == [1, 2]
