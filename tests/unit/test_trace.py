"""`areal-hpc trace`: spans nest, flows pair up, and the file stays bounded."""

from __future__ import annotations

import io
import json
from collections import defaultdict

import pytest

from areal_hpc.analysis import trace
from areal_hpc.analysis.history import load_history
from areal_hpc.cli import main as cli
from areal_hpc.controller.ledger import read_ledger
from controller_world import Disk
from run_folders import T0, make_run, quicken, set_times, write_ranks


@pytest.fixture
def paths(tmp_path, monkeypatch):
    quicken(monkeypatch)
    found = make_run(tmp_path).paths
    set_times(found, [(T0, 0)])
    write_ranks(found)
    return found


def events_of(paths, **options) -> list[dict]:
    out = io.StringIO()
    trace.Tracer(load_history(paths.root), out, trace.Window(), **options).run()
    return json.loads(out.getvalue())["traceEvents"]


def test_spans_of_a_thread_nest(paths):
    stacks: dict[tuple[int, int], list[dict]] = defaultdict(list)
    spans = [event for event in events_of(paths) if event["ph"] == "X"]
    assert len(spans) > 100
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        stack = stacks[span["pid"], span["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= span["ts"]:
            stack.pop()
        if stack:
            assert span["ts"] + span["dur"] <= stack[-1]["ts"] + stack[-1]["dur"] + 0.2, (span, stack[-1])
        stack.append(span)


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
