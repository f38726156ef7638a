"""Property tests of leases, admission, batches, journal and whole runs under random interleavings.

Invariants: Eq. 3 at every admission; each sample at most once in the surviving history; no
committed sample lost; no sample beyond the staleness bound, and none thrown away for it
where nothing fails.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from areal_hpc.analysis.audit import audit
from areal_hpc.controller import loop, progress, shutdown, startup
from areal_hpc.controller.batcher import Batcher, ReadyGroup, choose_epoch
from areal_hpc.controller.leases import LeaseBook
from areal_hpc.controller.ledger import Ledger, read_ledger
from areal_hpc.controller.staleness import StalenessBudget
from areal_hpc.paths import RunPaths
from areal_hpc.types import Prompt, SamplingSpec, ShardRow
from controller_world import Crash, Disk, Faults, FakeWorld, make_config

SEEDS = st.integers(0, 2**32 - 1)


# ---- leases ----------------------------------------------------------------------------


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["admit", "grant", "fail", "give up", "complete", "late", "wait"]), st.integers(0, 99)),
        min_size=60,  # short ones never come to a last attempt
        max_size=120,
    ),
    max_attempts=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_leases_under_any_interleaving(actions, max_attempts):
    """Against a plain model: every group ends exactly once, in a result or dropped."""
    room = {5: 2, 6: 3}
    book = LeaseBook(room=room, group_size=2, sampling=SamplingSpec(8), deadline_s=10.0, max_attempts=max_attempts)
    now, version, next_group = 0.0, 0, 0
    alive: dict[int, int] = {}  # group -> attempts
    holder: dict[int, tuple[int, int, float]] = {}  # lease -> (group, rank, end)
    ended: Counter[int] = Counter()
    every_lease: list[int] = []

    def lose(group: int, dropped: bool, retry: bool) -> None:
        assert dropped == (not retry or alive[group] >= max_attempts)
        if dropped:
            del alive[group]
            ended[group] += 1

    for action, choice in actions:
        match action:
            case "admit":
                book.admit(next_group, choice % 2, Prompt(next_group, ""), version)
                alive[next_group] = 0
                next_group += 1
            case "grant":
                version += choice % 2
                waiting = alive.keys() - {group for group, *_ in holder.values()}
                free = [rank for rank in room if sum(r == rank for _, r, _ in holder.values()) < room[rank]]
                granted = book.grant_next(now, version)
                assert (granted is None) == (not waiting or not free)
                if granted is not None:
                    rank, lease = granted
                    assert rank in free and lease.group_id in waiting and lease.lease_id not in every_lease
                    alive[lease.group_id] += 1
                    assert lease.attempt == alive[lease.group_id]
                    holder[lease.lease_id] = (lease.group_id, rank, now + 10.0)
                    every_lease.append(lease.lease_id)
            case "fail" | "give up" if every_lease:
                lease_id = every_lease[choice % len(every_lease)]
                outcome = book.fail(lease_id, retry=action == "fail")
                assert (outcome is None) == (lease_id not in holder)
                if outcome is not None:
                    lose(holder.pop(lease_id)[0], outcome[1], action == "fail")
            case "complete" | "late" if next_group:
                group = choice % next_group
                found = book.complete(group)
                assert (found is None) == (group not in alive)
                if found is not None:
                    del alive[group]
                    ended[group] += 1
                    holder = {lease: entry for lease, entry in holder.items() if entry[0] != group}
            case "wait":
                now += choice % 7
                late = {lease: entry for lease, entry in holder.items() if entry[2] <= now}
                outcomes = book.expire(now)
                assert Counter(group.group_id for group, _ in outcomes) == Counter(g for g, *_ in late.values())
                for lease in late:
                    del holder[lease]
                for group, dropped in outcomes:
                    lose(group.group_id, dropped, True)
        assert len(book) == len(alive)
        assert book.num_waiting == len(alive) - len(holder)
        assert sum(count for *_, count in book.classes()) == len(alive)
        for rank in room:
            assert book.loads.load(rank) == sum(r == rank for _, r, _ in holder.values()) <= room[rank]
    assert all(count == 1 for count in ended.values())


# ---- places and batches ----------------------------------------------------------------


@given(
    seed=SEEDS,
    batch_groups=st.integers(1, 4),
    eta=st.integers(0, 4),
    num_prompts=st.integers(1, 20),
    slow=st.sampled_from([0.02, 0.2, 0.6]),
)
@settings(max_examples=200, deadline=None)
def test_the_bound_holds_and_nothing_is_thrown_away_where_nothing_fails(seed, batch_groups, eta, num_prompts, slow):
    """Admission, batches and versions with random durations, against Eq. 3 as the paper writes it."""
    note(f"seed {seed}")
    chance = random.Random(seed)
    size = 2
    batch_size = batch_groups * size
    budget, batcher = StalenessBudget(batch_size, eta), Batcher()
    version, position = 0, 0
    under_way: dict[int, int] = {}
    in_training: list[ReadyGroup] = []
    trained: list[int] = []
    num_ever = 0  # N_r, counting a short batch as the whole one whose step it takes

    def epoch_of(group: int) -> int:
        return group // num_prompts

    for _ in range(300):
        while budget.may_admit(epoch_of(position), size) and chance.random() < 0.8:
            budget.admit(epoch_of(position), size)
            under_way[position] = version
            num_ever += size
            assert (num_ever - 1) // batch_size <= version + eta
            position += 1
            if position % num_prompts == 0:
                budget.close_epoch(epoch_of(position - 1))
                num_ever += -(num_prompts * size) % batch_size
        for group in list(under_way):
            if chance.random() < slow:
                begun = under_way.pop(group)
                # Its tokens may all be younger than its lease.
                oldest = chance.choice([begun, chance.randint(begun, version)])
                rows = tuple(
                    ShardRow(k, group, group, k, 5, 3, oldest, version, 1.0, "stop", 0) for k in range(size)
                )
                batcher.add(ReadyGroup(group, epoch_of(group), "a.h5", rows))
        if in_training and chance.random() < 0.5:
            for group in in_training:
                budget.release(group.epoch, size)
            in_training, version = [], version + 1
        if in_training:
            continue
        assert batcher.discard_older(version - eta) == []
        waiting = Counter((epoch_of(group), begun) for group, begun in under_way.items())
        choice = choose_epoch(
            batcher,
            [(epoch, begun, count * size) for (epoch, begun), count in waiting.items()],
            is_complete=lambda epoch: position >= (epoch + 1) * num_prompts and not any(
                epoch_of(group) == epoch for group in under_way
            ),
            version=version, eta=eta, batch_size=batch_size,
        )  # fmt: skip
        if choice.epoch is not None:
            in_training = batcher.take(choice.epoch, batch_size)
            assert in_training
            for group in in_training:
                assert version - group.min_version <= eta
                trained.append(group.group_id)
    assert len(set(trained)) == len(trained)
    assert version > 0 or slow < 0.1  # it moves


# ---- journal ---------------------------------------------------------------------------


@given(
    batches=st.lists(st.lists(st.dictionaries(st.text(max_size=5).map("f".__add__), st.integers() | st.text(max_size=20)),
                              max_size=4), max_size=6),
    cut=st.integers(0, 2000),
    garbage=st.binary(max_size=30),
)  # fmt: skip
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_journal_cut_anywhere_keeps_every_whole_record(batches, cut, garbage):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        ledger = Ledger(path)
        written = []
        for batch in batches:
            for fields in batch:
                ledger.add("live", **fields)
                written.append({"k": "live", **fields})
            ledger.sync()
        ledger.close()
        data = path.read_bytes()
        kept = data[: max(0, len(data) - cut)]
        whole = kept.count(b"\n")
        path.write_bytes(kept + (garbage.replace(b"\n", b"") if len(kept) < len(data) else b""))
        found = list(read_ledger(path, repair=True))
        assert found == written[:whole]
        assert list(read_ledger(path)) == found


# ---- whole runs ------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "echo", lambda line: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(progress.TensorBoard, "__init__", lambda self, folder: None)
    monkeypatch.setattr(progress.TensorBoard, "scalars", lambda self, values, step: None)
    monkeypatch.setattr(progress.TensorBoard, "close", lambda self: None)
    for module, name in ((loop, "IDLE_S"), (shutdown, "POLL_S"), (startup, "POLL_S")):
        monkeypatch.setattr(module, name, 0.0)


PROBABILITY = st.sampled_from([0.0, 0.0, 0.1, 0.3])
LIVES = st.lists(
    st.builds(
        Faults,
        fail=PROBABILITY, duplicate=PROBABILITY, publish=PROBABILITY,
        unread=st.sampled_from([0.0, 0.0, 0.2]), hidden=st.sampled_from([0.0, 0.0, 0.2]),
        restart=st.sampled_from([0.0, 0.02]), straggler=st.sampled_from([0.0, 0.1]),
        crash_at=st.integers(5, 120), stop_at=st.sampled_from([-1, -1, 20, 60]),
    ),
    max_size=4,
)  # fmt: skip


@given(
    seed=SEEDS,
    lives=LIVES,
    torn=st.integers(0, 60),
    shape=st.tuples(st.sampled_from([5, 12, 30]), st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 16])),
    eta=st.sampled_from([0, 1, 2, 4]),
    every=st.sampled_from([0, 1, 3]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_runs_with_crashes_stops_and_torn_journals_end_as_one_run_would(quick, seed, lives, torn, shape, eta, every):
    """Every life but the last ends by a crash or a stop; the last one has no faults."""
    note(f"seed {seed}")
    num_prompts, group_size, batch_size = shape
    epochs = 2
    with tempfile.TemporaryDirectory() as folder:
        root, disk = Path(folder), Disk()
        options = {
            "num_prompts": num_prompts, "rollout__group_size": group_size, "trainer__batch_size": batch_size,
            "algorithm__max_staleness": eta, "checkpoint__every": every, "data__epochs": epochs,
            "run__total_steps": 1000, "rollout__max_attempts": 1000, "weights__max_retries": 1000,
        }  # fmt: skip
        for life, faults in enumerate([*lives, Faults()]):
            config = make_config(root, **options)
            world = FakeWorld(config, RunPaths(root / "run", visible_s=0.1), disk, seed + life, faults)
            try:
                world.run()
            except Crash:
                if torn and world.paths.ledger.exists():
                    tear(world.paths.ledger, torn)
            result = audit(world.paths)
            assert result.problems == []
        per_epoch = -(-num_prompts * group_size // batch_size)
        trained = [sample for step in world.history for sample in step.samples]
        assert len(trained) == len(set(trained))
        for step in world.history:
            assert max(step.version - low for low in step.min_versions) <= eta
        if not result.counts["discarded"]:
            assert len(trained) == epochs * num_prompts * group_size
            if len(lives) == 0:
                assert len(world.history) == epochs * per_epoch


def tear(path: Path, num_bytes: int) -> None:
    """What an unsynced write leaves: the beginning of one more record."""
    with open(path, "ab") as file:
        file.write(b"0badc0de {\"k\":\"committed\",\"path\":\"spool/rollout-00000/x.h5\",\"groups\":[{\"group\":1"[:num_bytes])
