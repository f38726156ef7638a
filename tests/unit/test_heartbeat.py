"""Signs of life in telemetry, the number of an attempt and the clocks of the ranks."""

import json
import time

import pytest

from areal_hpc.controller.ledger import Ledger, num_attempts
from areal_hpc.heartbeat import introduce, start_heartbeat
from areal_hpc.mpi.clock import offset
from areal_hpc.mpi.world import World
from areal_hpc.telemetry import Telemetry


def test_a_rank_says_who_it_is_and_that_it_lives(tmp_path):
    path = tmp_path / "trainer-00001.jsonl"
    telemetry = Telemetry(path)
    world = World("trainer", 1, 2, (1, 2), (3,), ("a", "b", "c", "d"), channel=None)
    introduce(telemetry, world, attempt=3, clock=(0.25, 0.001))
    telemetry.value("waits in the buffer", 1)
    ended = start_heartbeat(telemetry, interval_s=0.05)
    time.sleep(0.3)
    ended.set()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0] | {"t": 0, "pid": 0, "cpus": []} == {
        "t": 0, "c": "start", "v": 3, "role": "trainer", "rank": 1, "world_rank": 2, "host": "c", "pid": 0,
        "cpus": [], "clock_s": 0.25, "clock_error_s": 0.001,
    }  # fmt: skip
    assert records[1]["c"] == "waits in the buffer", "a heartbeat brings what waits to the file"
    assert len([record for record in records if record["c"] == "alive"]) >= 3


def test_attempts_are_counted_without_a_torn_one(tmp_path):
    path = tmp_path / "ledger.jsonl"
    assert num_attempts(path) == 0
    ledger = Ledger(path)
    for attempt in (1, 2):
        ledger.add("run", attempt=attempt)
        ledger.add("admitted", group=1, text='"k":"run"')
    ledger.close()
    whole = path.read_bytes()
    assert num_attempts(path) == 2
    path.write_bytes(whole + whole.splitlines(keepends=True)[0][:-3])
    assert num_attempts(path) == 2


@pytest.mark.parametrize("ahead", [-3.0, 0.0, 0.7])
def test_an_offset_lies_within_its_error(ahead):
    # True times: the controller sends at 10.000 and receives at 10.030, the other 10.010 and 10.035.
    found, error = offset(10.000, 10.030, 10.010 + ahead, 10.035 + ahead)
    assert abs(found - ahead) <= error < 0.03
