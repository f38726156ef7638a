"""The controller's pure parts, with numbers: prompts, leases, places, batches."""

from __future__ import annotations

from collections import Counter

import pytest

from areal_hpc.controller.batcher import Batcher, Choice, ReadyGroup, choose_epoch, make_manifest, split_groups
from areal_hpc.controller.leases import LeaseBook, RankLoads
from areal_hpc.controller.prompts import PromptCursor
from areal_hpc.controller.staleness import StalenessBudget
from areal_hpc.types import Prompt, SamplingSpec, ShardRow

PROMPTS = [Prompt(prompt_id=n, text=f"prompt {n}") for n in range(30)]


def make_row(row: int, group: int, sample: int, *, tokens: int = 10, version: int = 0) -> ShardRow:
    return ShardRow(row, group, group, sample, tokens, tokens // 2, version, version, 1.0, "stop", 0)


def make_group(
    group: int, *, epoch: int = 0, version: int = 0, size: int = 2, tokens: int = 10, path: str = "a.h5"
) -> ReadyGroup:
    rows = tuple(make_row(group * size + k, group, k, tokens=tokens + k, version=version) for k in range(size))
    return ReadyGroup(group, epoch, path, rows)


# ---- prompts ---------------------------------------------------------------------------


def cursor(**changes: object) -> PromptCursor:
    return PromptCursor(PROMPTS, **({"seed": 3, "shuffle": True, "epochs": 2} | changes))


def take_all(prompts: PromptCursor, limit: int = 1000) -> list[tuple[int, int, int]]:
    taken = []
    while (entry := prompts.peek()) is not None and len(taken) < limit:
        taken.append((entry.ordinal, entry.epoch, entry.prompt.prompt_id))
        prompts.advance()
    return taken


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own():
    taken = take_all(cursor())
    assert [ordinal for ordinal, *_ in taken] == list(range(60))
    epochs = [[prompt for _, epoch, prompt in taken if epoch == e] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(30))
    assert epochs[0] != epochs[1] and epochs[0] != list(range(30))
    assert taken == take_all(cursor())
    assert taken != take_all(cursor(seed=4))
    assert [prompt for *_, prompt in take_all(cursor(shuffle=False, epochs=1))] == list(range(30))


@pytest.mark.parametrize("position", [0, 1, 29, 30, 31, 59, 60])
def test_a_position_is_the_whole_state(position):
    assert take_all(cursor(position=position)) == take_all(cursor())[position:]


def test_any_position_can_be_asked_again_and_the_end_of_data():
    prompts, taken = cursor(), take_all(cursor())
    for ordinal in (45, 3, 59, 0, 31):
        entry = prompts.at(ordinal)
        assert (entry.ordinal, entry.epoch, entry.prompt.prompt_id) == taken[ordinal]
    assert prompts.position == 0
    assert cursor(position=60).exhausted and cursor(position=60).peek() is None
    assert not cursor(epochs=0, position=10_000).exhausted
    assert [cursor(position=p).epoch_closed(0) for p in (29, 30)] == [False, True]


# ---- leases ----------------------------------------------------------------------------


def book(**changes: object) -> LeaseBook:
    options = {"room": {3: 2, 4: 2}, "group_size": 2, "sampling": SamplingSpec(8), "deadline_s": 10.0, "max_attempts": 3}
    return LeaseBook(**(options | changes))


def test_leases_go_to_the_emptiest_rank_until_none_has_room():
    leases = book(room={3: 1, 4: 3})
    for group in range(5):
        leases.admit(group, 0, PROMPTS[group], 0)
    granted = [leases.grant_next(0.0, 0) for _ in range(5)]
    assert [entry and entry[0] for entry in granted] == [3, 4, 4, 4, None]
    assert [entry[1].group_id for entry in granted[:4]] == [0, 1, 2, 3]
    assert (leases.num_waiting, leases.loads.load(4), len(leases)) == (1, 3, 5)
    assert leases.complete(2).rank == -1
    assert leases.grant_next(0.0, 0)[0] == 4


def test_an_expired_lease_goes_to_another_rank_and_the_late_result_is_accepted_once():
    leases = book()
    leases.admit(7, 0, PROMPTS[7], 0)
    rank, first = leases.grant_next(0.0, 0)
    assert leases.expire(9.9) == []
    ((group, dropped),) = leases.expire(10.0)
    assert (group.group_id, dropped, leases.num_expired) == (7, False, 1)
    other, second = leases.grant_next(10.0, 5)
    assert other != rank
    assert (first.group_id, first.attempt, second.group_id, second.attempt) == (7, 1, 7, 2)
    assert first.lease_id != second.lease_id
    assert list(leases.classes()) == [(0, 5, 1)]
    # Whichever answers first is taken, whatever its lease; the other one is refused.
    assert leases.complete(7) is not None
    assert leases.complete(7) is None
    assert (leases.num_duplicates, len(leases), leases.loads.load(rank), leases.loads.load(other)) == (1, 0, 0, 0)
    assert leases.fail(second.lease_id, retry=True) is None
    assert leases.expire(1e9) == []


def test_a_group_is_dropped_after_its_last_attempt_and_at_once_without_retry():
    leases = book(room={3: 2})
    leases.admit(1, 0, PROMPTS[1], 0)
    for attempt in (1, 2, 3):
        rank, lease = leases.grant_next(0.0, 0)
        assert (rank, lease.attempt) == (3, attempt)  # the only rank, though it failed there
        group, dropped = leases.fail(lease.lease_id, retry=True)
        assert dropped == (attempt == 3)
    assert leases.grant_next(0.0, 0) is None and len(leases) == 0
    leases.admit(2, 0, PROMPTS[2], 0)
    _, lease = leases.grant_next(0.0, 0)
    assert leases.fail(lease.lease_id, retry=False)[1]
    assert leases.under_way(0) == 0 and list(leases.classes()) == []


def test_a_failed_group_comes_before_new_ones_and_a_lost_lease_id_is_ignored():
    leases = book(room={3: 1, 4: 1})
    for group in range(3):
        leases.admit(group, 0, PROMPTS[group], 0)
    (_, first), (_, _) = leases.grant_next(0.0, 0), leases.grant_next(0.0, 0)
    leases.fail(first.lease_id, retry=True)
    assert leases.fail(first.lease_id, retry=True) is None
    rank, lease = leases.grant_next(0.0, 0)
    # Rank 4 is full: better the rank that failed than none.
    assert (rank, lease.group_id) == (3, 0)
    assert leases.fail(999, retry=True) is None


def test_rank_loads_do_not_pile_up_entries():
    loads = RankLoads({1: 10, 2: 20})
    for _ in range(10_000):
        rank = loads.emptiest()
        loads.change(rank, 1)
        loads.change(rank, -1)
    assert len(loads._heap) < 200
    loads.change(1, 5)
    assert loads.emptiest() == 2
    loads.change(2, 11)
    assert loads.emptiest() == 1
    assert loads.emptiest(avoid={1}) == 2
    assert loads.emptiest(avoid={1, 2}) in (1, 2)


# ---- places (Eq. 3) --------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "eta"), [(4, 0), (4, 1), (8, 4), (1, 3)])
def test_admission_is_equation_3_to_the_trajectory(batch, eta):
    budget = StalenessBudget(batch, eta)
    num_admitted, version = 0, 0
    for version in range(5):
        while budget.may_admit(0, 1):
            budget.admit(0, 1)
            num_admitted += 1
            assert (num_admitted - 1) // batch <= version + eta
        assert num_admitted // batch > version + eta  # the next one would break it
        budget.release(0, batch)


def test_sync_admits_one_batch_per_version():
    budget = StalenessBudget(16, 0)
    budget.admit(0, 16)
    assert not budget.may_admit(0, 1)
    budget.release(0, 16)
    assert budget.may_admit(0, 16)


def test_thirty_prompts_in_batches_of_16_take_two_steps():
    budget = StalenessBudget(16, 1)
    budget.admit(0, 30)
    assert (budget.taken, budget.may_admit(0, 2), budget.may_admit(0, 4)) == (30, True, False)
    budget.close_epoch(0)
    assert (budget.taken, budget.outstanding) == (32, 30)
    assert not budget.may_admit(1, 1)
    budget.release(0, 16)
    assert budget.taken == 16  # the 14 left take a whole step
    assert budget.may_admit(1, 16) and not budget.may_admit(1, 17)
    # A place given back in a closed epoch does not open a step for the next one.
    budget.release(0, 1)
    assert budget.taken == 16
    assert budget.may_admit(0, 3) and not StalenessBudget(16, 0).may_admit(0, 17)
    budget.release(0, 13)
    assert budget.taken == 0
    with pytest.raises(AssertionError):
        budget.release(0, 1)
    with pytest.raises(AssertionError):
        budget.admit(1, 33)


# ---- batches ---------------------------------------------------------------------------


def choose(batcher: Batcher, under_way=(), *, complete=(), version=0, eta=4, batch_size=4) -> Choice:
    return choose_epoch(
        batcher, under_way, is_complete=lambda epoch: epoch in complete, version=version, eta=eta, batch_size=batch_size
    )


def test_oldest_first_whole_groups_each_once():
    batcher = Batcher()
    for group, version in ((0, 3), (1, 1), (2, 2), (3, 1), (4, 9)):
        batcher.add(make_group(group, version=version))
    assert len(batcher) == 5 and batcher.num_trajectories(0) == 10
    assert [group.group_id for group in batcher.take(0, 5)] == [1, 3]
    assert [group.group_id for group in batcher.take(0, 4)] == [0, 2]
    assert [group.group_id for group in batcher.take(0, 4)] == [4]
    assert batcher.take(0, 4) == [] and len(batcher) == 0 and list(batcher.classes()) == []


def test_batches_do_not_mix_epochs_and_only_a_complete_epoch_gives_a_short_one():
    batcher = Batcher()
    batcher.add(make_group(0))
    assert choose(batcher, [(0, 0, 2)]) == Choice(None)
    assert choose(batcher) == Choice(None)
    assert choose(batcher, complete=[0]) == Choice(0)
    batcher.add(make_group(10, epoch=1))
    batcher.add(make_group(11, epoch=1))
    # The end of epoch 0 is awaited while epoch 1 trains.
    assert choose(batcher, [(0, 0, 2)]) == Choice(1)
    taken = batcher.take(1, 4)
    assert {group.epoch for group in taken} == {1}


def test_of_two_epochs_the_one_with_the_oldest_group_comes_first():
    batcher = Batcher()
    for group, epoch, version in ((0, 0, 3), (1, 0, 3), (10, 1, 2), (11, 1, 9), (20, 2, 2), (21, 2, 2)):
        batcher.add(make_group(group, epoch=epoch, version=version))
    assert choose(batcher, version=3) == Choice(1)
    batcher.take(1, 4)
    assert choose(batcher, version=3) == Choice(2)


def test_groups_too_old_are_taken_out():
    batcher = Batcher()
    for group, version in ((0, 3), (1, 1), (2, 2)):
        batcher.add(make_group(group, version=version))
    assert [group.group_id for group in batcher.discard_older(3)] == [1, 2]
    assert len(batcher) == 1
    nothing_trained = ReadyGroup(5, 0, "a.h5", (ShardRow(0, 5, 5, 0, 4, 0, -1, -1, 0.0, "stop", 0),))
    batcher.add(nothing_trained)
    assert batcher.discard_older(3) == []


def test_a_straggler_is_waited_for_when_it_could_not_be_trained_any_more():
    batcher = Batcher()
    for group in range(4):
        batcher.add(make_group(group, version=3))
    straggler = [(0, 1, 2)]
    # Trained from 2 + its own version at the latest: after this batch, version 3 is the last.
    assert choose(batcher, straggler, version=2, eta=2) == Choice(0)
    assert choose(batcher, straggler, version=3, eta=2) == Choice(None, held_for=1)
    # A batch of nothing but old groups is never held back: waiting would not change it.
    old = Batcher()
    old.add(make_group(8, version=1))
    old.add(make_group(9, version=1))
    assert choose(old, straggler, version=3, eta=2) == Choice(0)
    # What can no longer be trained is not waited for.
    assert choose(batcher, [(0, 0, 2)], version=3, eta=2) == Choice(0)


def test_more_stragglers_than_one_batch_holds_are_waited_for_in_time():
    batcher = Batcher()
    for group in range(2):
        batcher.add(make_group(group, version=2))
    # Three batches of version 0 are under way, eta 4: trained from 2, 3 and 4 at the latest.
    assert choose(batcher, [(0, 0, 8)], version=2) == Choice(0)
    assert choose(batcher, [(0, 0, 9)], version=2) == Choice(None, held_for=0)
    assert choose(batcher, [(0, 0, 12)], version=1) == Choice(0)
    assert choose(batcher, [(0, 0, 4), (1, 0, 1), (0, 1, 99)], version=2) == Choice(None, held_for=1)
    assert choose(batcher, [(0, 0, 4), (1, 0, 4)], version=2) == Choice(0)
    assert choose(batcher, [(0, 0, 4), (1, 0, 5)], version=2) == Choice(None, held_for=0)


def test_a_damaged_shard_takes_its_groups_out():
    batcher = Batcher()
    for group in range(4):
        batcher.add(make_group(group, path=f"{group % 2}.h5", epoch=group // 2))
    assert sorted(group.group_id for group in batcher.remove_shard("1.h5")) == [1, 3]
    assert len(batcher) == 2 and batcher.num_trajectories(0) == 2
    batcher.remove_shard("0.h5")
    assert batcher.epochs == [] and list(batcher.classes()) == []


def test_a_group_answered_twice_in_one_shard_counts_once():
    rows = [make_row(0, 5, 0), make_row(1, 5, 1), make_row(2, 6, 0), make_row(3, 5, 0), make_row(4, 5, 1)]
    assert {g: [row.row for row in rows] for g, rows in split_groups(rows).items()} == {5: [0, 1], 6: [2]}


@pytest.mark.parametrize("dp", [1, 2, 3, 7])
def test_manifest_has_every_row_once_and_balances_tokens(dp):
    lengths = [900, 10, 20, 500, 30, 480, 40, 450, 700, 20]
    groups = [make_group(n, tokens=length, path=f"{n % 3}.h5") for n, length in enumerate(lengths)]
    manifest = make_manifest(groups, train_step=4, version=3, dp=dp)
    assert (manifest.train_step, manifest.version, manifest.epoch) == (4, 3, 0)
    assert Counter(index for share in manifest.dp_rows for index in share) == Counter(range(20))
    for group in groups:
        mine = [row for row in manifest.rows if row.group_id == group.group_id]
        assert [(manifest.shards[r.shard], r.row, r.sample_index, r.num_tokens) for r in mine] == [
            (group.path, row.row, row.sample_index, row.num_tokens) for row in group.rows
        ]
    loads = [sum(manifest.rows[index].num_tokens for index in share) for share in manifest.dp_rows]
    assert max(loads) - min(loads) <= 901
    assert max(loads) <= sum(loads) / dp + 901
