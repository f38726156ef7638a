"""Telemetry: every line is whole JSON, the file is bounded, attempts are told apart, nothing raises."""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import pytest

from areal_hpc import telemetry as module
from areal_hpc.telemetry import Telemetry


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_and_values_are_lines(tmp_path):
    path = tmp_path / "t" / "rollout-00000.jsonl"
    telemetry = Telemetry(path)
    before = time.time()
    with telemetry.span("work", step=3) as span:
        time.sleep(0.02)
        span["tokens"] = 7
    telemetry.value("running", 5, waiting=2)
    telemetry.close()
    work, running = lines(path)
    assert (work["s"], work["step"], work["tokens"]) == ("work", 3, 7) and 0.02 <= work["d"] < 2
    assert before - 0.001 <= work["t"] <= time.time() and "a" not in work
    assert (running["c"], running["v"], running["waiting"]) == ("running", 5, 2)


def test_a_span_is_recorded_when_its_body_fails(tmp_path):
    telemetry = Telemetry(tmp_path / "t.jsonl")
    with pytest.raises(KeyError):
        with telemetry.span("work"):
            raise KeyError("x")
    telemetry.close()
    assert lines(tmp_path / "t.jsonl")[0]["s"] == "work"


def test_lines_are_buffered_and_flushed_by_time(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    telemetry = Telemetry(path)
    telemetry.value("a", 1)
    assert path.read_bytes() == b""
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.0)
    telemetry.value("b", 2)
    assert [line["c"] for line in lines(path)] == ["a", "b"]


def test_the_file_is_bounded_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.0)
    path = tmp_path / "t.jsonl"
    telemetry = Telemetry(path, max_bytes=5000)
    for number in range(1000):
        telemetry.value("x", number)
    telemetry.close()
    assert path.stat().st_size < 5000 + 500
    assert lines(path)[-1]["c"] == "telemetry.full"
    assert sum(line["c"] == "telemetry.full" for line in lines(path)) == 1
    # A resumed run does not begin to fill it again.
    size = path.stat().st_size
    telemetry = Telemetry(path, max_bytes=5000)
    for number in range(1000):
        telemetry.value("x", number)
    telemetry.close()
    assert path.stat().st_size == size


def test_a_resumed_run_goes_on_in_the_file_with_its_attempt(tmp_path):
    path = tmp_path / "t.jsonl"
    for attempt in (1, 2):
        telemetry = Telemetry(path)
        telemetry.attempt = attempt
        telemetry.record_span("train.step", 1.0, 0.5, train_step=6)
        telemetry.close()
    assert [(line["train_step"], line["a"]) for line in lines(path)] == [(6, 1), (6, 2)]


def test_a_torn_line_of_a_killed_writer_costs_only_itself(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"c":"whole","v":1}\n{"c":"to')
    telemetry = Telemetry(path)
    telemetry.value("next", 2)
    telemetry.close()
    texts = path.read_text().splitlines()
    assert json.loads(texts[0])["c"] == "whole" and json.loads(texts[2])["c"] == "next" and len(texts) == 3


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), np.int64(3), float("nan"), 10**30, "\ud800", {1, 2}, b"x", None]
)
def test_whatever_is_recorded_makes_a_line(tmp_path, value):
    telemetry = Telemetry(tmp_path / "t.jsonl")
    telemetry.value("x", 1, extra=value)
    telemetry.close()
    [line] = lines(tmp_path / "t.jsonl")
    if isinstance(value, np.generic):
        assert line["extra"] == value.item()


def test_a_full_disk_stops_telemetry_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.0)

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_all", full)
    telemetry = Telemetry(tmp_path / "t.jsonl")
    for number in range(10):
        telemetry.value("x", number)
    telemetry.close()
    telemetry.value("after", 1)
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_threads_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.001)
    telemetry = Telemetry(tmp_path / "t.jsonl")
    threads = [
        threading.Thread(target=lambda name=name: [telemetry.value(name, n) for n in range(500)]) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    telemetry.close()
    found = lines(tmp_path / "t.jsonl")
    assert len(found) == 2000
    assert all([line["v"] for line in found if line["c"] == name] == list(range(500)) for name in "abcd")


def test_the_file_is_private(tmp_path):
    Telemetry(tmp_path / "t.jsonl").close()
    assert os.stat(tmp_path / "t.jsonl").st_mode & 0o077 == 0
