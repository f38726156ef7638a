"""The journal and what a restart makes of it: torn tails, full disks, lost history, shards on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.controller import ledger as ledger_module
from areal_hpc.controller.batcher import split_groups, ReadyGroup
from areal_hpc.controller.ledger import Ledger, LedgerError, read_ledger
from areal_hpc.controller.recovery import (
    TOO_OLD,
    adopt_orphans,
    committed_record,
    replay_ledger,
    verify_shards,
)
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import ShardWriter
from test_spool import damage, make_groups

RUN = "run-a"


def run_record(attempt: int = 1, train_step: int = 0) -> dict:
    return {"k": "run", "attempt": attempt, "train_step": train_step, "data": "d", "config": "c"}


def admitted(*groups: int) -> list[dict]:
    return [{"k": "admitted", "group": group, "epoch": 0, "version": 0} for group in groups]


def committed(*groups: int, path: str = "a.h5") -> dict:
    listed = [{"group": group, "epoch": 0, "rows": []} for group in groups]
    return {"k": "committed", "path": path, "digest": "x", "groups": listed}


def consumed(step: int, *groups: int) -> dict:
    return {"k": "consumed", "train_step": step, "version": step - 1, "groups": list(groups)}


# ---- the file --------------------------------------------------------------------------


def test_records_come_back_and_the_file_is_private(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.add("admitted", group=1, text="zwölf\n")
    assert list(read_ledger(path)) == []  # not promised before it is synced
    ledger.sync()
    ledger.add("live", version=3)
    ledger.close()
    again = Ledger(path)
    again.add("live", version=4)
    again.close()
    assert list(read_ledger(path)) == [
        {"k": "admitted", "group": 1, "text": "zwölf\n"}, {"k": "live", "version": 3}, {"k": "live", "version": 4},
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(read_ledger(tmp_path / "none")) == []


def test_any_torn_tail_is_cut_and_writing_goes_on(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for version in range(3):
        ledger.add("live", version=version)
    ledger.close()
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        expected = sum(end <= length for end in ends)
        assert len(list(read_ledger(path))) == expected
        assert path.read_bytes() == whole[:length]
        assert len(list(read_ledger(path, repair=True))) == expected
        more = Ledger(path)
        more.add("live", version=9)
        more.close()
        assert [record["version"] for record in read_ledger(path)] == [*range(expected), 9]


@pytest.mark.parametrize("byte", [0, 5, 12, 30])
def test_damage_before_the_end_is_an_error_with_its_place(tmp_path, byte):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for version in range(3):
        ledger.add("live", version=version)
    ledger.close()
    data = bytearray(path.read_bytes())
    second = data.index(b"\n") + 1
    data[second + byte] ^= 1
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=f"damaged at byte {second}"):
        list(read_ledger(path, repair=True))
    assert path.read_bytes() == data


def test_zeros_after_a_crash_are_a_torn_tail(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.add("live", version=1)
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(4096))
    assert len(list(read_ledger(path, repair=True))) == 1
    assert path.read_bytes() == whole


def test_a_failed_write_leaves_whole_records_and_can_be_tried_again(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.add("live", version=1)
    ledger.sync()
    ledger.add("live", version=2)
    real = ledger_module.write_all

    def part(descriptor: int, data: bytes) -> None:
        real(descriptor, data[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger_module, "write_all", part)
    with pytest.raises(OSError, match=r"disk full: writing \d+ bytes to .*ledger.jsonl lacks at least \d+ bytes"):
        ledger.sync()
    assert [record["version"] for record in read_ledger(path)] == [1]
    monkeypatch.setattr(ledger_module, "write_all", real)
    ledger.close()
    assert [record["version"] for record in read_ledger(path)] == [1, 2]


FULL = """
import os, sys
from pathlib import Path
from areal_hpc.controller.ledger import Ledger, read_ledger
from areal_hpc.durable import DiskFullError
folder = Path(sys.argv[1])
path = folder / "ledger.jsonl"
ledger = Ledger(path)
for n in range(10000):
    ledger.add("live", version=n, text="x" * 1000)
    try:
        ledger.sync()
    except DiskFullError as error:
        assert "ledger.jsonl" in str(error) and "bytes" in str(error)
        break
else:
    raise SystemExit("the disk never filled")
found = [record["version"] for record in read_ledger(path)]
assert found == list(range(n)), (len(found), n)
"""


def test_a_disk_that_really_is_full(tmp_path):
    probe = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*probe, "true"], capture_output=True).returncode:
        pytest.skip("no unprivileged mount namespace for a small tmpfs")
    script = tmp_path / "fill.py"
    script.write_text(FULL)
    mount = tmp_path / "small"
    mount.mkdir()
    command = 'mount -t tmpfs -o size=256k none "$0" && exec "$1" "$2" "$0"'
    done = subprocess.run(
        [*probe, "sh", "-c", command, str(mount), sys.executable, str(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- conclusions -----------------------------------------------------------------------


def test_a_fresh_run_has_no_past():
    state = replay_ledger([], 0)
    assert (state.attempt, state.position, state.ready, state.in_flight) == (0, 0, {}, [])


def test_the_cursor_is_what_was_admitted_not_the_step():
    records = [run_record(), *admitted(0, 1, 2, 3, 4, 5), committed(0, 1, 3), consumed(1, 0, 1)]
    state = replay_ledger(records, 1)
    assert state.position == 6
    assert state.consumed == {0: 1, 1: 1}
    assert sorted(state.ready) == [3]
    assert state.in_flight == [2, 4, 5]


def test_going_back_makes_later_batches_available_again():
    records = [
        run_record(), *admitted(0, 1, 2, 3), committed(0, 1, 2, 3), consumed(1, 0), consumed(2, 1), consumed(3, 2),
        {"k": "eval", "train_step": 0, "accuracy": 0.5}, {"k": "eval", "train_step": 2, "accuracy": 0.5},
    ]  # fmt: skip
    state = replay_ledger(records, 1)
    assert sorted(state.ready) == [1, 2, 3]
    assert (state.consumed, state.num_returned, state.evaluated) == ({0: 1}, 2, {0})
    # A second attempt from step 1 trained them in another order, then went on.
    records += [run_record(2, 1), consumed(2, 3), consumed(3, 1)]
    again = replay_ledger(records, 3)
    assert (again.consumed, sorted(again.ready), again.attempt) == ({0: 1, 3: 2, 1: 3}, [2], 2)
    # Going back behind both attempts.
    assert sorted(replay_ledger(records, 0).ready) == [0, 1, 2, 3]


def test_what_was_given_up_stays_so_and_too_old_is_a_matter_of_history():
    records = [
        run_record(), *admitted(*range(6)), committed(1, 2, 3), {"k": "dropped", "groups": [0], "reason": "gold"},
        {"k": "discarded", "groups": [1], "train_step": 4, "reason": "equal rewards"},
        {"k": "discarded", "groups": [2], "train_step": 4, "reason": TOO_OLD},
    ]  # fmt: skip
    late, early = replay_ledger(records, 5), replay_ledger(records, 4)
    assert (sorted(late.ready), late.in_flight, late.num_dropped) == ([3], [4, 5], 1)
    assert sorted(early.ready) == [2, 3]


def test_damaged_groups_are_asked_again_and_a_refused_batch_was_not_trained():
    records = [
        run_record(), *admitted(0, 1, 2), committed(0, 1, path="a.h5"), committed(2, path="b.h5"), consumed(1, 0, 2),
        {"k": "damaged", "path": "a.h5", "groups": [0, 1], "reason": "zeros"}, {"k": "unconsumed", "train_step": 1},
    ]  # fmt: skip
    state = replay_ledger(records, 1)
    assert (state.consumed, sorted(state.ready), state.in_flight) == ({}, [2], [0, 1])
    records += [committed(0, path="c.h5"), consumed(1, 0, 2)]
    state = replay_ledger(records, 1)
    assert (state.consumed, state.in_flight) == ({0: 1, 2: 1}, [1])


# ---- shards on disk --------------------------------------------------------------------


@pytest.fixture
def spooled(tmp_path):
    """Three announced shards of two groups each, and a journal that says so."""
    paths = RunPaths(tmp_path, visible_s=0.2)
    paths.create()
    writer = ShardWriter(paths.rollout_spool(0), RUN, 0)
    trajectories = make_groups(6, 4)
    ledger = Ledger(paths.ledger)
    ledger.add(**{"kind": "run"} | {key: value for key, value in run_record().items() if key != "k"})
    for group in range(8):
        ledger.add("admitted", group=group, epoch=0, version=0)
    shards = []
    for first in (0, 2, 4):
        info = writer.commit([sample for sample in trajectories if sample.group_id in (first, first + 1)])
        relative = paths.relative(info.path)
        groups = [ReadyGroup(g, 0, relative, rows) for g, rows in split_groups(info.rows).items()]
        ledger.add("committed", **committed_record(relative, info.digest, groups))
        shards.append(info)
    ledger.sync()
    yield paths, ledger, shards
    ledger.close()


def recovered(paths: RunPaths):
    return replay_ledger(read_ledger(paths.ledger), 0)


def test_ready_rows_survive_the_journal(spooled):
    paths, _, shards = spooled
    state = recovered(paths)
    assert sorted(state.ready) == [0, 1, 2, 3, 4, 5] and state.in_flight == [6, 7]
    assert state.ready[3].rows == tuple(row for row in shards[1].rows if row.group_id == 3)
    assert verify_shards(state, Ledger(paths.ledger), paths, RUN) == 0


@pytest.mark.parametrize("how", ["truncated", "zeros", "foreign", "schema", "bit", "missing", "other run", "swapped"])
def test_a_damaged_shard_is_quarantined_and_its_groups_are_asked_again(spooled, how, caplog):
    paths, ledger, shards = spooled
    path = shards[1].path
    if how == "missing":
        path.unlink()
    elif how == "other run":
        other = ShardWriter(paths.root / "other", "run-b", 0).commit(make_groups(1))
        other.path.rename(path)
    elif how == "swapped":
        path.write_bytes(shards[0].path.read_bytes())  # whole, but not the one that was announced
    else:
        damage(path, how)
    state = recovered(paths)
    with caplog.at_level("WARNING"):
        assert verify_shards(state, ledger, paths, RUN) == 2
    assert sum(path.name in record.message for record in caplog.records) == 1
    assert sorted(state.ready) == [0, 1, 4, 5] and state.in_flight == [2, 3, 6, 7]
    assert not path.exists()
    assert len(list(paths.quarantine.glob("*"))) == (how != "missing")
    ledger.sync()
    again = recovered(paths)
    assert sorted(again.ready) == [0, 1, 4, 5] and again.in_flight == [2, 3, 6, 7]


@pytest.mark.parametrize("when", ["in the same start", "at a later start", "as another"])
def test_a_missing_shard_that_appears_after_all_is_taken_in(spooled, when, caplog):
    paths, ledger, shards = spooled
    path = shards[1].path
    data = path.read_bytes()
    path.unlink()
    state = recovered(paths)
    assert verify_shards(state, ledger, paths, RUN) == 2
    if when != "in the same start":
        assert adopt_orphans(state, ledger, paths, RUN, group_size=4, num_prompts=30) == 0
        ledger.sync()
        state = recovered(paths)
        assert verify_shards(state, ledger, paths, RUN) == 0
    path.write_bytes(shards[0].path.read_bytes() if when == "as another" else data)
    found = adopt_orphans(state, ledger, paths, RUN, group_size=4, num_prompts=30)
    if when == "as another":
        assert found == 0 and state.in_flight == [2, 3, 6, 7] and "not the one that was announced" in caplog.text
        return
    assert found == 2 and state.in_flight == [6, 7] and state.ready[3].path == paths.relative(path)
    ledger.sync()
    again = recovered(paths)
    assert sorted(again.ready) == [0, 1, 2, 3, 4, 5] and verify_shards(again, ledger, paths, RUN) == 0
    assert adopt_orphans(again, ledger, paths, RUN, group_size=4, num_prompts=30) == 0


def test_shards_that_were_never_announced_are_taken_in(spooled, caplog):
    paths, ledger, shards = spooled
    writer = ShardWriter(paths.rollout_spool(1), RUN, 1)
    trajectories = make_groups(8, 4, seed=5)
    # Group 6 waits for a result; group 2 has one; group 7 is not whole.
    late = writer.commit([s for s in trajectories if s.group_id in (2, 6) or s.group_id == s.sample_index + 7])
    broken = writer.commit(trajectories[:4]).path
    damage(broken, "truncated")
    state = recovered(paths)
    with caplog.at_level("WARNING"):
        assert adopt_orphans(state, ledger, paths, RUN, group_size=4, num_prompts=30) == 1
    assert state.in_flight == [7] and state.ready[6].path == paths.relative(late.path)
    assert state.ready[2].path == paths.relative(shards[1].path)
    assert [broken.name in record.message for record in caplog.records] == [True]
    ledger.sync()
    again = recovered(paths)
    assert sorted(again.ready) == [0, 1, 2, 3, 4, 5, 6] and again.in_flight == [7]
    # Once is enough.
    assert adopt_orphans(again, ledger, paths, RUN, group_size=4, num_prompts=30) == 0


def test_a_path_that_leaves_the_run_folder_is_refused(spooled):
    paths, ledger, _ = spooled
    state = recovered(paths)
    state.ready[0] = ReadyGroup(0, 0, "../outside.h5", state.ready[0].rows)
    state.digests["../outside.h5"] = "x"
    with pytest.raises(ValueError, match="leaves the run folder"):
        verify_shards(state, ledger, paths, RUN)


def test_the_journal_is_lines_of_checksum_and_json(spooled):
    paths, *_ = spooled
    for line in paths.ledger.read_text().splitlines():
        checksum, body = line.split(" ", 1)
        assert len(checksum) == 8 and json.loads(body)["k"]


def test_a_torn_journal_is_not_cut_through_a_symbolic_link(tmp_path):
    outside, link = tmp_path / "precious", tmp_path / "ledger.jsonl"
    outside.write_text("no journal")
    link.symlink_to(outside)
    with pytest.raises(OSError, match="is a symbolic link"):
        list(read_ledger(link, repair=True))
    assert outside.read_text() == "no journal"
