"""The audit must find what it claims to prove absent: a run is made, then its record is falsified."""

from __future__ import annotations

import json
import os
import zlib

import pytest

from areal_hpc.analysis.audit import audit, audit_run
from areal_hpc.controller import startup
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import ShardWriter, read_rows
from controller_world import Crash, Disk, Faults, FakeWorld, make_config
from run_folders import quicken
from test_spool import damage


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunPaths:
    """A finished run of 6 steps in two attempts: batches of 8, groups of 2, eta 2."""
    quicken(monkeypatch)
    disk = Disk()
    for seed, faults in ((0, Faults(stop_at=40)), (1, Faults())):
        FakeWorld(make_config(tmp_path), RunPaths(tmp_path / "run"), disk, seed, faults).run()
    return RunPaths(tmp_path / "run")


def change(paths: RunPaths, edit) -> None:
    """Rewrite the journal with valid checksums; `edit` maps the list of records to the new one."""
    records = [json.loads(line[9:]) for line in paths.ledger.read_bytes().splitlines()]
    lines = []
    for record in edit(records):
        body = json.dumps(record).encode()
        lines.append(b"%08x %s\n" % (zlib.crc32(body), body))
    paths.ledger.write_bytes(b"".join(lines))


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [record for record in records if record["k"] == kind]


def problems(paths: RunPaths) -> str:
    return "\n".join(audit(paths).problems)


def test_a_good_run_passes(run, capsys):
    result = audit(run)
    assert result.problems == []
    assert (result.counts["trained"], result.counts["steps"], result.counts["attempts"]) == (24, 6, 2)
    assert result.max_staleness_seen <= 2
    assert audit_run(run.root) == 0
    assert "24 trained in 6 steps" in capsys.readouterr().out


def test_training_a_group_twice_is_found(run, capsys):
    def edit(records):
        steps = of_kind(records, "consumed")
        steps[3]["groups"][0] = steps[1]["groups"][0]
        return records

    change(run, edit)
    assert "was trained twice: at step 2 and at step 4" in problems(run)
    assert audit_run(run.root) == 1
    assert "offender: group" in capsys.readouterr().out


def test_training_twice_over_an_attempt_is_found(run):
    def edit(records):
        second = records.index(of_kind(records, "run")[1])
        before, after = of_kind(records[:second], "consumed"), of_kind(records[second:], "consumed")
        after[0]["groups"][0] = before[0]["groups"][0]
        return records

    change(run, edit)
    assert "was trained twice: at step 1" in problems(run)


def test_an_admission_past_the_bound_is_found(run):
    def edit(records):
        first = next(i for i, record in enumerate(records) if record["k"] == "admitted" and record["group"] == 12)
        record = records.pop(first)
        place = next(i for i, record in enumerate(records) if record["k"] == "live")
        records.insert(place, {**record, "version": 0})
        return records

    change(run, edit)
    assert "group 12 was admitted as trajectory 26 at version 0: floor(25/8) > 0 + 2 (Eq. 3)" in problems(run)


def test_a_sample_that_is_too_old_is_found_in_the_spool_itself(run):
    """The journal's summary says it is fresh; the shard's tokens say otherwise."""
    victims: list[str] = []

    def edit(records):
        for record in of_kind(records, "committed"):
            path = run.resolve_inside(record["path"])
            samples = read_rows(path)
            if min(sample.min_version for sample in samples) < 3:
                continue
            for sample in samples:
                sample.versions[-1] = 0
            info = ShardWriter(path.parent, "run", 0).commit(samples)
            os.replace(info.path, path)
            victims.append(path.name)
        return records

    change(run, edit)
    assert victims
    found = problems(run)
    assert "its oldest token is of version 0: staleness" in found and victims[0] in found
    assert "is not in" in found and "what the journal says it is" in found


def test_changed_tokens_and_missing_shards_are_found(run):
    shards = sorted(run.spool.glob("*/*.h5"))
    damage(shards[0], "bit")
    shards[1].unlink()
    found = problems(run)
    assert shards[0].name in found and ("digest" in found or "checksum" in found)
    assert shards[1].name in found and "No such file" in found


def test_a_lost_commitment_is_found(run):
    change(run, lambda records: [r for r in records if r is not of_kind(records, "committed")[2]])
    assert "but never committed" in problems(run)


def test_a_commitment_without_admission_is_found(run):
    change(run, lambda records: [r for r in records if not (r["k"] == "admitted" and r["group"] == 5)])
    assert "group 5 of" in problems(run) and "never admitted" in problems(run)


@pytest.mark.parametrize(("step", "member", "why"), [(2, -1, "found it too old"), (6, 0, "took younger groups")])
def test_a_group_that_is_in_no_batch_is_found(run, step, member, why):
    """To the journal it waits; but the newest batch went past it."""
    victims: list[int] = []

    def edit(records):
        groups = of_kind(records, "consumed")[step - 1]["groups"]
        committed = [group["group"] for record in of_kind(records, "committed") for group in record["groups"]]
        versions = {
            group["group"]: min(row["min_version"] for row in group["rows"])
            for record in of_kind(records, "committed") for group in record["groups"]
        }  # fmt: skip
        victims.append(sorted(groups, key=lambda group: (versions[group], committed.index(group)))[member])
        groups.remove(victims[0])
        return records

    change(run, edit)
    # That its place was never given back is another problem of the early one.
    (problem,) = [text for text in audit(run).problems if "neither trained nor left out" in text]
    assert problem.startswith(f"group {victims[0]}, committed in spool/") and f"although step 6 {why}" in problem


@pytest.mark.parametrize(
    ("kind", "crash_at", "options", "why"),
    [
        ("ready", 20, {}, "although step 6 found it too old"),
        # The data ends before the steps are done: then nothing at all may be left over.
        ("ready", 20, {"run__total_steps": 20, "data__epochs": 1}, "although the data ended"),
        ("in_flight", 8, {"run__total_steps": 20, "data__epochs": 1}, "was admitted but neither answered nor left out"),
    ],
)
def test_a_recovery_that_forgets_a_group_is_found(tmp_path, monkeypatch, kind, crash_at, options, why):
    quicken(monkeypatch)
    config, paths, disk = make_config(tmp_path, **options), RunPaths(tmp_path / "run"), Disk()
    with pytest.raises(Crash):
        FakeWorld(config, paths, disk, 0, Faults(crash_at=crash_at)).run()
    assert problems(paths) == ""
    real, forgotten = startup.replay_ledger, []

    def forgetful(*arguments):
        state = real(*arguments)
        forgotten.append(min(getattr(state, kind)))
        if kind == "ready":
            del state.ready[forgotten[0]]
        else:
            state.in_flight.remove(forgotten[0])
        return state

    monkeypatch.setattr(startup, "replay_ledger", forgetful)
    FakeWorld(config, paths, disk, 1).run()
    assert any(text.startswith(f"group {forgotten[0]}") and why in text for text in audit(paths).problems)


def test_skipped_steps_and_versions_are_found(run):
    def edit(records):
        of_kind(records, "consumed")[-1]["train_step"] += 1
        return records

    change(run, edit)
    assert "step 7 from version 5 follows step 5" in problems(run)


def test_training_a_discarded_group_is_found(run):
    def edit(records):
        step = of_kind(records, "consumed")[-1]
        place = records.index(step)
        note = {"k": "discarded", "groups": step["groups"][:1], "train_step": 5, "reason": "too old"}
        return records[:place] + [note] + records[place:]

    change(run, edit)
    assert "although it was discarded" in problems(run)


def test_a_mixed_or_overlong_batch_is_found(run):
    def edit(records):
        steps = of_kind(records, "consumed")
        # To a later step: whatever the order of commits in this run, the group was there by then.
        steps[-1]["groups"].append(steps[-2]["groups"].pop())
        return records

    change(run, edit)
    found = problems(run)
    assert "trained 10 samples, more than a batch of 8" in found or "mixed the epochs" in found


def test_a_damaged_journal_is_reported(run):
    data = bytearray(run.ledger.read_bytes())
    data[data.index(b"\n") + 20] ^= 1
    run.ledger.write_bytes(data)
    assert "is damaged at byte" in problems(run)


def test_reading_a_run_changes_nothing(run):
    torn = run.ledger.read_bytes() + b"0badc0de {"
    run.ledger.write_bytes(torn)
    assert problems(run) == ""
    assert run.ledger.read_bytes() == torn
